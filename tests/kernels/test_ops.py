"""The operations around LoRA against exact results in float64."""

import pytest
import torch

from loraplex.kernels import AttentionShape, GeluOps, HeadNorms, KvBatch, Ops, RopeTable

from .cases import assert_close, make_kv_batch
from .conftest import native_ops


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 64, 100])
@pytest.mark.parametrize(("d_in", "d_out"), [(576, 960), (64, 16), (96, 50), (80, 33)])
def test_linear(rows: int, d_in: int, d_out: int, ops_and_dtype: tuple[Ops, torch.dtype]) -> None:
    ops, dtype = ops_and_dtype
    x, weight = randn(rows, d_in, dtype=dtype), randn(d_out, d_in, dtype=dtype, seed=1)
    bias = randn(d_out, dtype=dtype, seed=2) if rows % 2 else None
    exact = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    for out_dtype in (dtype, torch.float32):
        out = torch.empty(rows, d_out, dtype=out_dtype)
        ops.linear(x, ops.prepare_linear(weight, bias), out)
        assert_close(out, exact, dtype)


def test_native_linear_gives_a_row_the_same_bits_in_any_batch() -> None:
    ops = native_ops()
    x, weight = randn(100, 576, dtype=torch.bfloat16), randn(960, 576, dtype=torch.bfloat16, seed=1)
    linear = ops.prepare_linear(weight, None)
    together = torch.empty(100, 960, dtype=torch.bfloat16)
    ops.linear(x, linear, together)
    for first, count in ((0, 1), (31, 1), (99, 1), (10, 17), (50, 33)):
        alone = torch.empty(count, 960, dtype=torch.bfloat16)
        ops.linear(x[first : first + count], linear, alone)
        assert torch.equal(alone, together[first : first + count])


@pytest.mark.parametrize("width", [64, 576, 50])
@pytest.mark.parametrize("with_delta", [False, True])
def test_add_rms_norm(width: int, with_delta: bool, ops_and_dtype: tuple[Ops, torch.dtype]) -> None:
    ops, dtype = ops_and_dtype
    residual, weight = randn(5, width, dtype=dtype), randn(width, dtype=dtype, seed=1)
    delta = randn(5, width, dtype=dtype, seed=2) if with_delta else None
    total = (residual.double() + (delta.double() if delta is not None else 0)).to(dtype).double()
    exact = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    out = torch.empty_like(residual)
    ops.add_rms_norm(residual, delta, weight, 1e-5, out)
    assert_close(residual, total, dtype)
    assert_close(out, exact, dtype)


@pytest.mark.parametrize("width", [64, 50])
def test_norm_in_place_with_a_float32_weight(width: int, ops_and_dtype: tuple[Ops, torch.dtype]) -> None:
    """As Gemma has them: 1 + weight, and what attention and MLP add normalised where it is."""
    ops, dtype = ops_and_dtype
    x, weight = randn(5, width, dtype=dtype), 1.0 + randn(width, dtype=dtype, seed=1).float() / 64
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    ops.add_rms_norm(x, None, weight, 1e-5, x)
    assert_close(x, exact, dtype)


@pytest.mark.parametrize("width", [16, 40, 1536])
def test_gelu_and_mul(width: int, ops_and_dtype: tuple[Ops, torch.dtype]) -> None:
    ops, dtype = ops_and_dtype
    assert isinstance(ops, GeluOps)
    for size in (0.01, 1.0, 20.0):
        gate_up = randn(7, 2 * width, dtype=dtype) * size
        gate, up = gate_up.double().chunk(2, dim=-1)
        out = torch.empty(7, width, dtype=dtype)
        ops.gelu_and_mul(gate_up, out)
        exact = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
        assert_close(out, exact, dtype)


def test_gelu_of_extremes(ops_and_dtype: tuple[Ops, torch.dtype]) -> None:
    ops, dtype = ops_and_dtype
    assert isinstance(ops, GeluOps)
    gate = torch.tensor([[float("nan"), float("inf"), 1e30, -1e30, 0.0, -0.0]], dtype=dtype)
    out = torch.empty(1, 6, dtype=dtype)
    ops.gelu_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=1), out)
    assert out[0, 0].isnan()
    assert out[0, 1:].tolist() == [float("inf"), gate[0, 2].item(), 0.0, 0.0, 0.0]


@pytest.mark.parametrize("width", [16, 40, 1536])
def test_silu_and_mul(width: int, ops_and_dtype: tuple[Ops, torch.dtype]) -> None:
    ops, dtype = ops_and_dtype
    gate_up = randn(7, 2 * width, dtype=dtype) * 20
    gate, up = gate_up.double().chunk(2, dim=-1)
    out = torch.empty(7, width, dtype=dtype)
    ops.silu_and_mul(gate_up, out)
    assert_close(out, gate * torch.sigmoid(gate) * up, dtype)


SHAPES = {
    "smollm2": (9, 3, 64, 0, 16),
    "one kv head": (5, 1, 16, 0, 16),
    "wide heads": (4, 2, 128, 0, 32),
    "head of 48": (6, 6, 48, 0, 16),
    "head of 96": (4, 4, 96, 20, 16),
    "head of 256": (8, 4, 256, 40, 16),
    "window": (4, 2, 32, 7, 16),
    "window over pages": (4, 2, 32, 40, 16),
    "window over key blocks": (8, 2, 64, 150, 16),
    "many heads a key": (32, 2, 64, 0, 16),
}
LENGTHS, NEW_ROWS = [1, 16, 17, 300, 133, 70], [1, 16, 1, 190, 1, 40]


def exact_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, window: int, softcap: float = 0.0
) -> torch.Tensor:
    """One row in float64. q [heads, d]; keys, values [tokens, kv_heads, d]."""
    first = max(0, position - window + 1) if window else 0
    groups = q.shape[0] // keys.shape[1]
    k = keys[first : position + 1].double().repeat_interleave(groups, 1)
    v = values[first : position + 1].double().repeat_interleave(groups, 1)
    scores = torch.einsum("hd,thd->ht", q.double(), k) * q.shape[-1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    return torch.einsum("ht,thd->hd", scores.softmax(-1), v)


def fill_pages(kv: KvBatch, lengths: list[int], layer: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Random keys and values for every token of every sequence; the same are returned in order."""
    page_tokens, heads, dim = kv.pages.shape[3:]
    keys, values = [], []
    for seq, length in enumerate(lengths):
        keys.append(randn(length, heads, dim, dtype=kv.pages.dtype, seed=10 + seq))
        values.append(randn(length, heads, dim, dtype=kv.pages.dtype, seed=20 + seq))
        for token in range(length):
            page = int(kv.page_table[seq, token // page_tokens])
            kv.pages[page, layer, 0, token % page_tokens] = keys[seq][token]
            kv.pages[page, layer, 1, token % page_tokens] = values[seq][token]
    return keys, values


@pytest.mark.parametrize("softcap", [0.0, 0.7, 50.0])
@pytest.mark.parametrize("name", SHAPES)
def test_attention(name: str, softcap: float, ops_and_dtype: tuple[Ops, torch.dtype]) -> None:
    ops, dtype = ops_and_dtype
    heads, kv_heads, dim, window, page_tokens = SHAPES[name]
    shape = AttentionShape(heads, kv_heads, dim, dim**-0.5, window, softcap)
    kv = make_kv_batch(
        dtype, layers=3, kv_heads=kv_heads, head_dim=dim, page_tokens=page_tokens, lengths=LENGTHS, new_rows=NEW_ROWS
    )
    keys, values = fill_pages(kv, LENGTHS, layer=1)
    rows = sum(NEW_ROWS)
    qkv = randn(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    out = torch.empty(rows, heads * dim, dtype=dtype)
    ops.attention(qkv, 1, shape, ops.bind_kv(kv), out)
    for row in range(rows):
        seq, position = int(kv.row_seq[row]), int(kv.row_pos[row])
        q = qkv[row, : heads * dim].view(heads, dim)
        exact = exact_attention(q, keys[seq], values[seq], position, window, softcap)
        assert_close(out[row].view(heads, dim), exact, dtype)


def attention_case(shape: AttentionShape, lengths: list[int], new_rows: list[int]) -> tuple[torch.Tensor, KvBatch]:
    """Queries and filled pages of one layer; the same lengths give the same keys and queries at the same positions."""
    heads = shape.num_heads + 2 * shape.num_kv_heads
    kv = make_kv_batch(
        torch.bfloat16,
        layers=1,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        page_tokens=16,
        lengths=lengths,
        new_rows=new_rows,
    )
    fill_pages(kv, lengths, layer=0)
    everything = randn(400, heads * shape.head_dim, dtype=torch.bfloat16)
    return everything[kv.row_pos.long()].contiguous(), kv


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (40, 0.0), (150, 0.0), (40, 2.0)])
def test_native_attention_gives_a_row_the_same_bits_in_any_chunk(window: int, softcap: float) -> None:
    ops = native_ops()
    shape = AttentionShape(9, 3, 64, 0.125, window, softcap)

    def run(length: int, new_rows: int) -> torch.Tensor:
        qkv, kv = attention_case(shape, [length], [new_rows])
        out = torch.empty(new_rows, 9 * 64, dtype=torch.bfloat16)
        ops.attention(qkv, 0, shape, ops.bind_kv(kv), out)
        return out

    whole = run(300, 300)
    for length, new_rows in ((300, 1), (300, 37), (257, 129), (129, 1), (128, 1), (5, 3)):
        # Keys are drawn a sequence at a time: a shorter one is a prefix only if the generator fills row by row.
        part = run(length, new_rows)
        expected = whole if length == 300 else run(length, length)
        assert torch.equal(part, expected[length - new_rows : length]), (length, new_rows)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("where", ["key", "value", "query"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("head_dim", [48, 64])
def test_non_finite_attention_is_not_hidden(
    where: str, bad: float, head_dim: int, softcap: float, ops_and_dtype: tuple[Ops, torch.dtype]
) -> None:
    ops, dtype = ops_and_dtype
    if softcap and bad == float("inf") and where != "value":
        pytest.skip("a soft cap makes an infinite score finite, in transformers as here")
    shape = AttentionShape(4, 2, head_dim, 0.1, 0, softcap)
    kv = make_kv_batch(
        dtype, layers=1, kv_heads=2, head_dim=head_dim, page_tokens=16, lengths=[140, 20], new_rows=[1, 1]
    )
    fill_pages(kv, [140, 20], layer=0)
    qkv = randn(2, 8 * head_dim, dtype=dtype)
    clean = torch.empty(2, 4 * head_dim, dtype=dtype)
    ops.attention(qkv, 0, shape, ops.bind_kv(kv), clean)
    if where == "query":
        qkv[0, :] = bad
    else:
        kv.pages[int(kv.page_table[0, 3]), 0, int(where == "value"), 5] = bad
    out = torch.empty(2, 4 * head_dim, dtype=dtype)
    ops.attention(qkv, 0, shape, ops.bind_kv(kv), out)
    assert not torch.isfinite(out[0]).all()
    assert torch.equal(out[1], clean[1])


@pytest.mark.parametrize("rotated_part", [1.0, 0.75])
@pytest.mark.parametrize("norms_in", ["none", "model's type", "float32"])
@pytest.mark.parametrize("name", ["smollm2", "one kv head", "head of 48"])
def test_rope_and_store(name: str, norms_in: str, rotated_part: float, ops_and_dtype: tuple[Ops, torch.dtype]) -> None:
    ops, dtype = ops_and_dtype
    heads, kv_heads, dim, _, page_tokens = SHAPES[name]
    kv = make_kv_batch(
        dtype, layers=2, kv_heads=kv_heads, head_dim=dim, page_tokens=page_tokens, lengths=LENGTHS, new_rows=NEW_ROWS
    )
    half = int(dim * rotated_part) // 2
    angles = torch.arange(320)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    rope = RopeTable(angles.cos().float(), angles.sin().float())
    norms = None
    if norms_in != "none":
        norm_dtype = torch.float32 if norms_in == "float32" else dtype
        norms = HeadNorms(randn(dim, dtype=norm_dtype, seed=1), randn(dim, dtype=norm_dtype, seed=2), 1e-6)
    qkv = randn(sum(NEW_ROWS), (heads + 2 * kv_heads) * dim, dtype=dtype)
    exact = qkv.double().view(-1, heads + 2 * kv_heads, dim).clone()
    if norms is not None:
        normed = exact[:, : heads + kv_heads]
        scale = torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + 1e-6)
        weights = torch.cat((norms.q_weight.expand(heads, -1), norms.k_weight.expand(kv_heads, -1))).double()
        exact[:, : heads + kv_heads] = normed * scale * weights
    rotated = exact[:, : heads + kv_heads]
    c, s = (angles[kv.row_pos.long()].double().cos()[:, None], angles[kv.row_pos.long()].double().sin()[:, None])
    a, b = rotated[..., :half].clone(), rotated[..., half : 2 * half].clone()
    rotated[..., :half], rotated[..., half : 2 * half] = a * c - b * s, b * c + a * s
    ops.rope_and_store(qkv, 1, AttentionShape(heads, kv_heads, dim, 1.0, 0), rope, norms, ops.bind_kv(kv))
    assert_close(qkv.view(-1, heads + 2 * kv_heads, dim)[:, :heads], exact[:, :heads], dtype)
    for row in range(qkv.shape[0]):
        position = int(kv.row_pos[row])
        page = int(kv.page_table[int(kv.row_seq[row]), position // page_tokens])
        stored = kv.pages[page, 1, :, position % page_tokens]
        assert_close(stored[0], exact[row, heads : heads + kv_heads], dtype)
        assert_close(stored[1], exact[row, heads + kv_heads :], dtype)
    written = torch.isfinite(kv.pages).sum()
    assert written == qkv.shape[0] * 2 * kv_heads * dim
