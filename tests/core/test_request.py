"""Which weights an answer says it came from."""

from loraplex.core import AdapterDigest, AdapterRef, BaseFingerprint, ServedBy

FINGERPRINT = BaseFingerprint("0123456789abcdef" * 4)
ALPHA = AdapterRef("alpha", 3, AdapterDigest("fedcba9876543210" * 4))


def test_adapter_is_named_with_its_version() -> None:
    assert ALPHA.label == "alpha@3"


def test_base_answers_under_its_own_name() -> None:
    served_by = ServedBy("tiny", FINGERPRINT, None)
    assert served_by.model == "tiny"
    assert served_by.system_fingerprint == "base-0123456789ab"


def test_adapter_answers_under_its_label_and_both_fingerprints() -> None:
    served_by = ServedBy("tiny", FINGERPRINT, ALPHA, cold=True, load_s=0.5)
    assert served_by.model == "alpha@3"
    assert served_by.system_fingerprint == "base-0123456789ab.lora-fedcba987654"


def test_versions_of_an_adapter_differ_in_model_and_fingerprint() -> None:
    other = AdapterRef("alpha", 4, AdapterDigest("0" * 64))
    first, second = (ServedBy("tiny", FINGERPRINT, ref) for ref in (ALPHA, other))
    assert first.model != second.model
    assert first.system_fingerprint != second.system_fingerprint
