"""Top-k, top-p and min-p by thresholds, against sorting: in the interpreter on the CPU, compiled on a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from loraplex.kernels.gpu.sampling import filter_weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def kept_by_sorting(weights: torch.Tensor, min_p: float, top_k: int, top_p: float) -> set[int]:
    """Ids that stay, tokens as likely as the last one included."""
    ids = [i for i in weights.argsort(descending=True).tolist() if weights[i] >= min_p]
    if top_k:
        ids = [i for i in ids if weights[i] >= weights[ids[min(top_k, len(ids)) - 1]]]
    if top_p == 1.0:
        return set(ids)
    wide = weights.double()
    total, mass, last = float(wide[ids].sum()), 0.0, 0.0
    for i in ids:
        if mass >= top_p * total * (1 - 1e-6):
            break
        mass, last = mass + float(wide[i]), float(weights[i])
    return {i for i in ids if weights[i] >= last}


@pytest.mark.parametrize("width", [1, 7, 160, 5000])
def test_what_stays_is_what_sorting_keeps(width: int) -> None:
    options = [(0.0, 0, 1.0), (0.0, 1, 1.0), (0.0, 5, 1.0), (0.0, 10**6, 1.0), (0.0, 0, 0.5), (0.0, 0, 0.99)]
    options += [(0.2, 0, 1.0), (1.0, 0, 1.0), (0.05, 20, 0.9), (0.0, 3, 0.01), (0.0, 0, 1e-6)]
    generator = torch.Generator().manual_seed(width)
    logits = 3 * torch.randn(len(options), width, generator=generator)
    logits[:, : width // 3] = logits[:, :1]  # many of the same weight
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    padded = torch.zeros(len(options), width + 9)
    padded[:, :width] = weights
    on_device = padded.to(DEVICE)
    min_p, top_k, top_p = zip(*options, strict=True)
    filter_weights(
        on_device[:, :width],
        torch.tensor(min_p, device=DEVICE),
        torch.tensor(top_k, dtype=torch.int32, device=DEVICE),
        torch.tensor(top_p, device=DEVICE),
    )
    for row, option in enumerate(options):
        got = on_device[row, :width].cpu()
        kept = set(got.nonzero().flatten().tolist())
        assert kept == kept_by_sorting(weights[row], *option) & set(weights[row].nonzero().flatten().tolist()), option
        assert torch.equal(got[sorted(kept)], weights[row][sorted(kept)])


def test_row_does_not_depend_on_the_others() -> None:
    weights = torch.rand(3, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    weights /= weights.amax(-1, keepdim=True)
    together, alone = weights.to(DEVICE).clone(), weights[1:2].to(DEVICE).clone()

    def settings(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            torch.zeros(rows, device=DEVICE),
            torch.full((rows,), 40, dtype=torch.int32, device=DEVICE),
            torch.full((rows,), 0.7, device=DEVICE),
        )

    filter_weights(together, *settings(3))
    filter_weights(alone, *settings(1))
    assert torch.equal(together[1], alone[0])
