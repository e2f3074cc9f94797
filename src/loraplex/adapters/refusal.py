"""Building refusals: a stable code and one sentence that names the subject and shows at most a piece of any value."""

from loraplex.core import AdapterRefused, RefusalReason

_MAX_SHOWN_CHARS = 120


def show(value: object) -> str:
    """`repr` of a value from a file, shortened. Unprintable characters come out escaped."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def field_invalid(field: str, value: object, wanted: str) -> AdapterRefused:
    """FIELD_INVALID for a config field whose type or value is wrong."""
    got = "null or nothing" if value is None else show(value)
    message = f"adapter_config.json: {show(field)} must be {wanted}, got {got}."
    return AdapterRefused(RefusalReason.FIELD_INVALID, message, field)


def unsupported(field: str, value: object, why: str) -> AdapterRefused:
    """FEATURE_UNSUPPORTED for a config field that asks for more than plain LoRA."""
    message = f"adapter_config.json: {show(field)} is {show(value)}, which is not supported: {why}."
    return AdapterRefused(RefusalReason.FEATURE_UNSUPPORTED, message, field)


def tensor_refused(reason: RefusalReason, name: str, problem: str) -> AdapterRefused:
    """A refusal about one tensor; `problem` continues the sentence after the tensor's name."""
    return AdapterRefused(reason, f"Tensor {show(name)} {problem}.", name)
