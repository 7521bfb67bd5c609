"""Writes the GPU-like cost tables of the simulator from public numbers: a roofline.

    python benchmark/simulator/make_cost_tables.py

    time(rows) = launch + max(bytes / bandwidth, rows * flops / peak) + rows * reduce

bytes: the weights that a forward multiplies by, read once. flops: 2 per such weight.
Rows of a forward are rounded up to SGLang's sizes of captured graphs. Reading the KV
cache costs its bytes per token. Tensor parallelism divides bytes, flops and KV by the
GPUs and adds two all-reduces per layer. Nothing here was measured: the shapes are what
matters (where a step stops being bound by memory, what a draft step costs beside it),
and each table states its numbers, their sources and the arithmetic.

`python` prints nothing but the files' names; they are meant to be committed.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from sglang_tetris.core import CostTable

TABLES = Path(__file__).parent / "cost_tables"
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# SGLang 0.5.23, generate_decode_cuda_graph_batch_sizes with speculation, up to 512.
GRAPH_SIZES = (
    *range(1, 9),
    *range(10, 33, 2),
    *range(40, 65, 4),
    *range(72, 257, 8),
    *range(272, 513, 16),
)
# Share of the data sheet's numbers that large kernels reach.
OF_BANDWIDTH, OF_PEAK = 0.85, 0.65
VOCABULARY = 128_256
DRAFT_VOCABULARY = 32_000
BYTES = 2  # bfloat16


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Data sheet: bytes per second, dense bfloat16 operations per second."""

    name: str
    bandwidth: float
    peak: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Model:
    """A Llama; sizes as in its config.json."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    kv_width: int  # key-value heads times their size
    source: str

    @property
    def weights(self) -> int:
        """What a forward multiplies by: the layers and the output matrix."""
        attention = 2 * self.hidden * (self.hidden + self.kv_width)
        mlp = 3 * self.hidden * self.intermediate
        return self.layers * (attention + mlp) + VOCABULARY * self.hidden

    @property
    def draft_weights(self) -> int:
        """An EAGLE-3 head: one layer over twice the width, a fusion of three states."""
        attention = 2 * self.hidden * (self.hidden + 2 * self.kv_width)
        attention += self.hidden * self.hidden
        mlp = 3 * self.hidden * self.intermediate
        fusion = 3 * self.hidden * self.hidden
        return attention + mlp + fusion + DRAFT_VOCABULARY * self.hidden

    @property
    def kv_bytes(self) -> int:
        return self.layers * 2 * self.kv_width * BYTES


LLAMA = "config.json of the model; EAGLE-3 head: arXiv 2503.01840, section 3"
H100 = Gpu(
    name="NVIDIA H100 SXM5",
    bandwidth=3.35e12,
    peak=989e12,
    source="NVIDIA H100 data sheet: 3.35 TB/s, 989 TFLOPS bfloat16 without sparsity",
)
L4 = Gpu(
    name="NVIDIA L4",
    bandwidth=300e9,
    peak=121e12,
    source="NVIDIA L4 data sheet: 300 GB/s, 242 TFLOPS bfloat16 with sparsity, half "
    "of it without",
)
LLAMA_8B = Model(
    name="Llama-3.1-8B",
    layers=32,
    hidden=4096,
    intermediate=14336,
    kv_width=1024,
    source=LLAMA,
)
LLAMA_70B = Model(
    name="Llama-3.1-70B",
    layers=80,
    hidden=8192,
    intermediate=28672,
    kv_width=1024,
    source=LLAMA,
)
LLAMA_3B = Model(
    name="Llama-3.2-3B",
    layers=28,
    hidden=3072,
    intermediate=8192,
    kv_width=1024,
    source=LLAMA,
)

# Seconds. A captured graph's kernels follow each other within a few microseconds.
LAUNCH_PER_LAYER = 10e-6
# An all-reduce of small messages over NVLink, and what a link moves per second of it.
ALL_REDUCE, LINK = 10e-6, 400e9
# What the scheduler does between two steps: 158 tokens/s of Llama-3.1-8B on one H100
# without speculation (SGLang's documentation) are 6.3 ms per step, 5.6 of them here.
OUTSIDE, OUTSIDE_PER_REQUEST = 0.7e-3, 5e-6


def forward(
    gpu: Gpu,
    gpus: int,
    *,
    weights: int,
    layers: int,
    hidden: int,
    kv_bytes: int,
    captured: bool = True,
) -> CostTable:
    """Return the roofline of one forward."""
    bandwidth, peak = gpu.bandwidth * OF_BANDWIDTH, gpu.peak * OF_PEAK
    read_s = weights * BYTES / gpus / bandwidth
    row_s = 2 * weights / gpus / peak
    launch_s = layers * LAUNCH_PER_LAYER
    reduce_s = 0.0
    if gpus > 1:
        launch_s += 2 * layers * ALL_REDUCE
        moved = hidden * BYTES * 2 * (gpus - 1) / gpus
        reduce_s = 2 * layers * moved / LINK
    ridge = round(read_s / row_s)
    rows = sorted({*ROWS, ridge})
    return CostTable(
        token_knots=tuple(rows),
        knot_times_s=tuple(
            launch_s + max(read_s, n * row_s) + n * reduce_s for n in rows
        ),
        per_kv_token_s=kv_bytes / gpus / bandwidth,
        bucket_edges=GRAPH_SIZES if captured else (),
    )


def sampling(gpu: Gpu, passes: int) -> CostTable:
    """Return a sampler that reads a row's float32 logits so many times."""
    row_s = passes * VOCABULARY * 4 / (gpu.bandwidth * OF_BANDWIDTH)
    return CostTable(
        token_knots=(1, 16384), knot_times_s=(40e-6 + row_s, 40e-6 + 16384 * row_s)
    )


def make(gpu: Gpu, gpus: int, model: Model) -> tuple[CostTable, dict[str, object]]:
    """Return a table and where it comes from."""
    target = forward(
        gpu,
        gpus,
        weights=model.weights,
        layers=model.layers,
        hidden=model.hidden,
        kv_bytes=model.kv_bytes,
    )
    draft = {"weights": model.draft_weights, "layers": 2, "hidden": model.hidden}
    draft_kv = model.kv_bytes // model.layers
    phases = {
        "decode": target,
        "draft_step": forward(gpu, gpus, **draft, kv_bytes=draft_kv),
        "draft_extend": forward(gpu, gpus, **draft, kv_bytes=draft_kv),
        "sample_greedy": sampling(gpu, 1),
        "sample_multinomial": sampling(gpu, 4),
        "sample_sorted": sampling(gpu, 30),
        "outside": CostTable(
            token_knots=(1,), knot_times_s=(OUTSIDE,), per_request_s=OUTSIDE_PER_REQUEST
        ),
    }
    table = CostTable(
        token_knots=target.token_knots,
        knot_times_s=target.knot_times_s,
        per_kv_token_s=target.per_kv_token_s,
        bucket_edges=target.bucket_edges,
        phases=phases,
    )
    weight_bytes = model.weights * BYTES / gpus
    read_ms = weight_bytes / (gpu.bandwidth * OF_BANDWIDTH) * 1e3
    row_us = 2 * model.weights / gpus / (gpu.peak * OF_PEAK) * 1e6
    provenance: dict[str, object] = {
        "measured": False,
        "command": "python benchmark/simulator/make_cost_tables.py",
        "gpu": f"{gpus} x {gpu.name}",
        "gpu_source": gpu.source,
        "model": model.name,
        "model_source": model.source,
        "assumed": {
            "share_of_bandwidth": OF_BANDWIDTH,
            "share_of_peak": OF_PEAK,
            "launch_us_per_layer": LAUNCH_PER_LAYER * 1e6,
            "all_reduce_us": ALL_REDUCE * 1e6 if gpus > 1 else 0,
            "outside_ms": OUTSIDE * 1e3,
            "outside_us_per_request": OUTSIDE_PER_REQUEST * 1e6,
        },
        "arithmetic": [
            f"target: {model.weights / 1e9:.2f}e9 weights x 2 bytes / {gpus} = "
            f"{weight_bytes / 1e9:.2f} GB, at {OF_BANDWIDTH} of the bandwidth "
            f"{read_ms:.2f} ms",
            f"target: 2 operations per weight and row, at {OF_PEAK} of the peak "
            f"{row_us:.1f} us per row: bound by memory up to "
            f"{read_ms * 1e3 / row_us:.0f} rows",
            f"draft: {model.draft_weights / 1e9:.3f}e9 weights, "
            f"{model.draft_weights / model.weights:.1%} of the target's",
            f"KV cache: {model.kv_bytes} bytes per token",
        ],
        "not_modelled": "whether the KV cache fits; eager launches beyond the largest "
        "captured graph",
    }
    return table, provenance


def main() -> None:
    TABLES.mkdir(exist_ok=True)
    for name, gpu, gpus, model in (
        ("h100-llama-8b", H100, 1, LLAMA_8B),
        ("4xh100-llama-70b", H100, 4, LLAMA_70B),
        ("l4-llama-3b", L4, 1, LLAMA_3B),
    ):
        table, provenance = make(gpu, gpus, model)
        fields = {"provenance": provenance, **json.loads(table.to_json())}
        path = TABLES / f"{name}.json"
        path.write_text(json.dumps(fields, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
