"""What the models need of a GPU's memory, and which of RunPod's GPUs so hold which settings.

Arithmetic over the models' shapes; nothing is measured here. `memory` measures it, and what it finds should go first.

    needed = fixed + INTER_THREADS × workspace + weights + INTER_THREADS × BATCH_SIZE × window

A window's encoder and its decoder run one after the other, so it counts with the larger of both. Each is what
CTranslate2 holds at its peak: one layer's attention of all heads over all positions twice, before and after the
softmax; and the decoder's keys and values of all layers, for each beam as long as its text can become. docs/tuning.md
has the formula in full, and how it compares with what was measured on a CPU and with published figures of a GPU.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass

from benchmarks import BEAM_SIZE
from benchmarks.models import AUDIO_POSITIONS, SHAPES, TEXT_POSITIONS, Shape
from benchmarks.report import Report, Table, Value
from whisper_worker.settings import Settings, Threads

NAME = "gpus"
HELP = "what the models need of a GPU's memory, and which GPUs hold which settings: computed, not measured"
QUICK: dict[str, object] = {}
IS_IN_ALL = False

GB = 1e9  # those of some GPUs are GiB, but error correction takes a part: this is the safe side

# CUDA's context, the kernels, cuBLAS, and what the allocator keeps. With large-v2 in float16 and one window, READMEs of
# faster-whisper have 4,525 MiB in use on an RTX 3070 Ti and, earlier, 4,755 MiB on a V100S: 1.0 and 1.2 GB over
# the weights and a window.
FIXED_BYTES = 1.3 * GB
WORKSPACE_BYTES = 32 * 1024**2  # cuBLAS's own, one for each thread: 32 MiB on Hopper, 4 MiB before (NVIDIA's manual)
USABLE = 0.9  # of a GPU's memory: the rest is lost in fragments, or taken by the driver

# By docs/tuning.md a worker that has loaded base (int8) holds 322 MiB: Python, the SDK, speech detection, and weights.
PROCESS_BYTES = 0.3 * GB
CPU_CORES = 4  # of the example with a CPU

# Times positions × width: a layer's input, itself and normalised; queries, keys and values, together and for each head;
# what attention gives, and the layer's output.
ENCODER_ACTIVATIONS = 10
LOGIT_BYTES = 12  # for each token of each beam: float32 scores, their softmax, and a copy of them for the best ones

SHORT_NAMES = {"large-v3-turbo": "turbo"}
MOST_BATCH = 64  # a larger one isn't worth telling: the gain is long used up


@dataclass(frozen=True)
class Numbers:
    """Bytes of a number: in the matrices of linear layers and the embeddings, in other weights, while it computes."""

    matrix: int
    other: int
    activation: int


COMPUTE_TYPES = {
    "float32": Numbers(4, 4, 4),
    "float16": Numbers(2, 2, 2),
    "bfloat16": Numbers(2, 2, 2),
    "int8": Numbers(1, 4, 4),
    "int8_float32": Numbers(1, 4, 4),
    "int8_float16": Numbers(1, 2, 2),
    "int8_bfloat16": Numbers(1, 2, 2),
}


@dataclass(frozen=True)
class Pool:
    """GPUs that an endpoint can ask for by one name."""

    memory_gb: int
    cards: str


POOLS = {
    "AMPERE_16": Pool(16, "A4000, RTX 4000, RTX 2000; A4500 with 20 GB"),
    "AMPERE_24": Pool(24, "L4, A5000, 3090"),
    "ADA_24": Pool(24, "4090"),
    "AMPERE_48": Pool(48, "A6000, A40"),
    "ADA_48_PRO": Pool(48, "L40, L40S, 6000 Ada"),
    "AMPERE_80": Pool(80, "A100"),
    "ADA_80_PRO": Pool(80, "H100"),
    "HOPPER_141": Pool(141, "H200"),
}


def matrix_parameters(shape: Shape) -> int:
    """Those of linear layers and of the tokens' embeddings (which are the projection to tokens too)."""
    attention, feed_forward = 4 * shape.width**2, 8 * shape.width**2
    encoder = shape.encoder_layers * (attention + feed_forward)
    decoder = shape.decoder_layers * (2 * attention + feed_forward)
    return encoder + decoder + shape.tokens * shape.width


def other_parameters(shape: Shape) -> int:
    """Convolutions, positions, biases and norms."""
    width = shape.width
    attention, feed_forward = (4 + 2) * width, (5 + 2) * width
    layers = shape.encoder_layers * (attention + feed_forward) + shape.decoder_layers * (2 * attention + feed_forward)
    convolutions = 3 * width * (shape.mels + width) + 2 * width
    return layers + convolutions + (AUDIO_POSITIONS + TEXT_POSITIONS) * width + 4 * width


def parameters(shape: Shape) -> int:
    return matrix_parameters(shape) + other_parameters(shape)


def weights_bytes(shape: Shape, numbers: Numbers) -> int:
    return numbers.matrix * matrix_parameters(shape) + numbers.other * other_parameters(shape)


def encoder_bytes(shape: Shape, numbers: Numbers) -> int:
    """At most, for one window of 30 s."""
    attention = 2 * shape.heads * AUDIO_POSITIONS**2
    return numbers.activation * (attention + ENCODER_ACTIVATIONS * AUDIO_POSITIONS * shape.width)


def decoder_bytes(shape: Shape, numbers: Numbers, beams: int, positions: int = TEXT_POSITIONS) -> int:
    """At most, for one window whose beams have so many positions, prompt and text together.

    The audio's keys and values are there once for all beams. One layer of the text's is there twice, while the beams
    that go on are gathered.
    """
    audio = 2 * shape.decoder_layers * AUDIO_POSITIONS * shape.width
    text = 2 * (shape.decoder_layers + 1) * beams * positions * shape.width
    return numbers.activation * (audio + text) + LOGIT_BYTES * beams * shape.tokens


def window_bytes(shape: Shape, numbers: Numbers, beams: int = BEAM_SIZE, positions: int = TEXT_POSITIONS) -> int:
    """At most, for one window of a call: its features, the encoder's output, and what encoder or decoder need."""
    features = 4 * shape.mels * 2 * AUDIO_POSITIONS
    output = numbers.activation * AUDIO_POSITIONS * shape.width
    return features + output + max(encoder_bytes(shape, numbers), decoder_bytes(shape, numbers, beams, positions))


def gpu_bytes(shape: Shape, numbers: Numbers, inter: int, windows_bytes: int) -> float:
    """Of a GPU, with `inter` calls at the same moment, whose windows all together take `windows_bytes`."""
    return FIXED_BYTES + inter * WORKSPACE_BYTES + weights_bytes(shape, numbers) + windows_bytes


def cpu_bytes(shape: Shape, threads: Threads) -> float:
    """What the worker takes of a machine without a GPU, beside its jobs' audio."""
    numbers = COMPUTE_TYPES["int8"]
    windows_bytes = threads.inter * threads.batch * window_bytes(shape, numbers)
    return PROCESS_BYTES + weights_bytes(shape, numbers) + windows_bytes


def largest_batch(shape: Shape, numbers: Numbers, inter: int, window: int, memory_bytes: float) -> int:
    """The most windows in each of `inter` calls that a GPU with such a memory holds; 0: none. At most MOST_BATCH."""
    free = USABLE * memory_bytes - gpu_bytes(shape, numbers, inter, 0)
    return max(0, min(MOST_BATCH, int(free / (inter * window))))


def table(compute_type: str = "float16", beams: int = BEAM_SIZE, positions: int = TEXT_POSITIONS) -> Table:
    """With the default settings for a GPU, and for each size of GPU the largest BATCH_SIZE."""
    numbers, defaults = COMPUTE_TYPES[compute_type], Threads.plan(Settings(), "cuda", CPU_CORES)
    inter, batch = defaults.inter, defaults.batch
    sizes = sorted({pool.memory_gb for pool in POOLS.values()})
    rows: list[list[Value]] = []
    for name, shape in SHAPES.items():
        window = window_bytes(shape, numbers, beams, positions)
        batches = [largest_batch(shape, numbers, inter, window, size * GB) for size in sizes]
        rows.append(
            [
                SHORT_NAMES.get(name, name),
                round(parameters(shape) / 1e6),
                weights_bytes(shape, numbers) / GB,
                window / GB,
                gpu_bytes(shape, numbers, inter, inter * batch * window) / GB,
                *(f"{inter} × {most}" if most else "none" for most in batches),
            ]
        )
    used = [f"{inter} × {batch}: needs, GB", *(f"{size} GB holds" for size in sizes)]
    columns = ["model", "weights, millions", "weights, GB", "window, GB", *used]
    return Table(f"Memory of a GPU, {compute_type}, {beams} beams: computed, not measured", columns, rows)


def cpu_table() -> Table:
    """With the default settings for a CPU."""
    threads = Threads.plan(Settings(), "cpu", CPU_CORES)
    title = f"Memory on {CPU_CORES} CPU cores, int8, {threads.inter} × {threads.batch}: computed, not measured"
    rows: list[list[Value]] = [
        [SHORT_NAMES.get(name, name), cpu_bytes(shape, threads) / GB] for name, shape in SHAPES.items()
    ]
    return Table(title, ["model", "needs, GB"], rows)


def add_arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(device="cuda")
    parser.add_argument("--beams", type=int, default=BEAM_SIZE, help="of a request: its `beam_size` (%(default)s)")
    parser.add_argument(
        "--positions", type=int, default=TEXT_POSITIONS, help="of each beam, prompt and text together (%(default)s)"
    )


def run(options: Namespace) -> Report:
    if options.compute_type not in COMPUTE_TYPES:
        raise SystemExit(f"gpus: --compute-type: {options.compute_type} is none of {', '.join(COMPUTE_TYPES)}")
    return Report(
        NAME,
        "Memory of a GPU, computed",
        tables=[table(options.compute_type, options.beams, options.positions), _pools_table(), cpu_table()],
        notes=[
            "INTER_THREADS × BATCH_SIZE: the number of calls at the same moment, and of windows in each.",
            f"A window has 30 s, and {options.positions} positions for each of its {options.beams} beams.",
            f"Fixed: {FIXED_BYTES / GB:g} GB, and {WORKSPACE_BYTES / GB:.3f} GB for each call at the same moment. "
            f"{100 * USABLE:g} % of a GPU's memory count as usable. BATCH_SIZE beyond {MOST_BATCH} isn't told.",
        ],
    )


def _pools_table() -> Table:
    rows: list[list[Value]] = [[name, pool.memory_gb, pool.cards] for name, pool in POOLS.items()]
    return Table("RunPod's pools", ["pool", "memory, GB", "GPUs"], rows)
