"""From an adapter directory to exact weights for one base, or a refusal with the most helpful reason."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from loraplex.adapters.artifact import Artifact, read_artifact
from loraplex.adapters.digest import digest_modules
from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.peft_config import TrainedBiases, parse_document, read_config
from loraplex.adapters.refusal import tensor_refused, unsupported
from loraplex.adapters.safetensors_file import SERVED_DTYPES, check_finite, read_tensors
from loraplex.adapters.targets import Target, expand_targets
from loraplex.adapters.tensor_names import LoraPair, check_vocabulary, find_modules, pair_tensors
from loraplex.adapters.types import Adapter, AdapterModule, TensorView
from loraplex.core import AdapterRefused, BaseDescription, RefusalReason


def load_adapter(directory: Path, base: BaseDescription, limits: AdapterLimits) -> Adapter:
    """Read and check an adapter for one base. Blocks on files. Raises AdapterRefused; nothing is kept then."""
    return check_artifact(read_artifact(directory, limits), base, limits)


def check_artifact(artifact: Artifact, base: BaseDescription, limits: AdapterLimits) -> Adapter:
    """Check the bytes of an adapter against a base. No I/O. Raises AdapterRefused.

    The order decides which reason is given: unreadable files, then what can never be an adapter (another vocabulary),
    features, names, pairs, coverage, sizes, and last the values, which cost most to look at.
    """
    document = parse_document(artifact.config)
    tensors = read_tensors(artifact.weights)
    check_vocabulary(tensors, base)
    config = read_config(document)
    if not tensors:
        raise AdapterRefused(RefusalReason.WEIGHTS_EMPTY, "adapter_model.safetensors holds no tensors.")
    targets = expand_targets(config, base, find_modules(tensors, base))
    _check_biases(config.bias, targets, base)
    pairs = pair_tensors(tensors, base)
    _check_storage(tensors)
    _check_coverage(targets, pairs)
    modules = tuple(_make_module(target, pairs[target.site.name], limits) for target in targets)
    for tensor in tensors:
        check_finite(tensor)
    return Adapter(
        digest=digest_modules(modules),
        modules=modules,
        max_rank=max(module.rank for module in modules),
        num_bytes=sum(len(tensor.data) for tensor in tensors),
        targets=tuple(dict.fromkeys(module.site.module for module in modules)),
        declared_base=config.declared_base,
    )


def _check_biases(trained: TrainedBiases, targets: Sequence[Target], base: BaseDescription) -> None:
    """Refuse trained biases where there are some to train; elsewhere PEFT trains and saves the pairs alone."""
    if trained is TrainedBiases.NONE:
        return
    sites = base.sites if trained is TrainedBiases.ALL else tuple(target.site for target in targets)
    biased = next((site.name for site in sites if site.has_bias), None)
    if biased is not None:
        raise unsupported("bias", trained.value, f"it replaces biases of the shared base, as that of {biased!r}")


def _check_storage(tensors: Iterable[TensorView]) -> None:
    for tensor in tensors:
        if tensor.dtype not in SERVED_DTYPES:
            problem = f"has dtype {tensor.dtype}; only {', '.join(SERVED_DTYPES)} are served"
            raise tensor_refused(RefusalReason.DTYPE_UNSUPPORTED, tensor.name, problem)
        if len(tensor.data) == 0:
            raise tensor_refused(RefusalReason.WEIGHTS_EMPTY, tensor.name, f"has no elements (shape {tensor.shape})")


def _check_coverage(targets: Sequence[Target], pairs: Mapping[str, LoraPair]) -> None:
    """Config and tensors must name the same modules: neither side is dropped in silence."""
    names = {target.site.name for target in targets}
    without_tensors = next((target.site.name for target in targets if target.site.name not in pairs), None)
    if without_tensors is not None:
        message = f"The config adapts {without_tensors!r}, but the file has no tensors for it."
        raise AdapterRefused(RefusalReason.TARGET_NOT_COVERED, message, without_tensors)
    untargeted = next((name for name in pairs if name not in names), None)
    if untargeted is not None:
        message = f"The file has tensors for {untargeted!r}, which the config does not adapt."
        raise AdapterRefused(RefusalReason.TARGET_NOT_COVERED, message, untargeted)


def _make_module(target: Target, pair: LoraPair, limits: AdapterLimits) -> AdapterModule:
    """Check the shapes of one pair: A [rank, d_in], B [d_out, rank]."""
    site, a, b = target.site, pair.a, pair.b
    if len(a.shape) != 2 or a.shape[1] != site.d_in:
        raise _shape_refused(a, f"[rank, {site.d_in}]", site.name)
    if len(b.shape) != 2 or b.shape[0] != site.d_out:
        raise _shape_refused(b, f"[{site.d_out}, rank]", site.name)
    for tensor, rank in ((a, a.shape[0]), (b, b.shape[1])):
        if rank != target.rank:
            problem = f"has rank {rank}, but the config gives {site.name!r} rank {target.rank}"
            raise tensor_refused(RefusalReason.RANK_MISMATCH, tensor.name, problem)
    if limits.max_rank is not None and target.rank > limits.max_rank:
        message = f"{site.name!r} has rank {target.rank}; the limit is {limits.max_rank} (--max-lora-rank)."
        raise AdapterRefused(RefusalReason.RANK_TOO_LARGE, message, site.name)
    return AdapterModule(site=site, rank=target.rank, scale=target.scale, a=a, b=b)


def _shape_refused(tensor: TensorView, wanted: str, site_name: str) -> AdapterRefused:
    problem = f"has shape {list(tensor.shape)}, but {site_name!r} of the base needs {wanted}"
    return tensor_refused(RefusalReason.SHAPE_MISMATCH, tensor.name, problem)
