"""What is chosen by measurements: the fastest of the libraries that give the same bits, and sizes of steps."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.cache import cache_dir
from configs.facts import KvCacheDtype, ModelFacts
from configs.models import resolve_for
from configs.profiles import MeasuredProduct, RowsChoice, read_profile
from configs.schema import ClusterConfig
from configs.sharding import rank_facts
from engine.batch import Chunk
from engine.model_runner import ModelRunner
from engine.models.packing import Quantization
from engine.native.build import Built, load_alike, load_library
from engine.native.library import NativeLibrary
from engine.profiling import measure as measuring
from engine.profiling import steps as timing
from engine.profiling.choosing import BATCH_TOKENS, CHUNK_TOKENS, MOST_SPREAD, TIE, choose, noisy, step_sizes
from engine.profiling.key import profile_key
from engine.profiling.measure import ROWS, measure_product, profile_here
from engine.profiling.products import Product, products_of
from protocol.sampling import SamplingParams
from tests.tiny_models import BYTE_TOKENS, random_model, save_byte_tokenizer, saved, tiny_facts
from tests.torch_threads import torch_threads
from tests.unit.engine.conftest import WIDE, SmallModel

ALIKE = load_alike(torch.bfloat16)
NATIVE = pytest.mark.skipif(not ALIKE, reason="needs native operators")
PRODUCTS = (Product("qkv", 4, 64, 128), Product("qkv", 8, 64, 128), Product("qkv", 16, 64, 128))
SMALL = tiny_facts("profiled", **WIDE)
Rounds = dict[str, list[float]]


class Delayed:
    """The functions of a library, each of which takes four milliseconds more."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._functions, name)

        def slow(*arguments: Any) -> None:
            time.sleep(0.004)
            real(*arguments)

        self.__dict__[name] = slow
        return slow


def twin(built: Built) -> Built:
    """The same library under another name."""
    own = built.instruction_set
    return Built(replace(own, name="twin", arithmetic=own.arithmetic or own.name), built.functions)


def delayed(built: Built) -> Built:
    return Built(built.instruction_set, Delayed(built.functions))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder without measurements, and with the libraries that were compiled before."""
    native = cache_dir() / "native"
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    if native.exists():
        (tmp_path / "native").symlink_to(native)
    return tmp_path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads that wait for each other are held up for milliseconds where something else computes."""
    with torch_threads(1):
        yield


@NATIVE
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: f"{product.bits} bits")
def test_a_slow_kernel_is_not_chosen(product: Product) -> None:
    first = ALIKE[0]
    slow = measure_product(product, torch.bfloat16, 1, [delayed(first), twin(first)])
    assert [choice.library for choice in slow.choices] == ["twin"] * len(ROWS)
    slow = measure_product(product, torch.bfloat16, 1, [first, delayed(twin(first))])
    assert [choice.library for choice in slow.choices] == [first.instruction_set.name] * len(ROWS)


@NATIVE
@pytest.mark.usefixtures("own_cache")
def test_a_kernel_that_became_slow_is_not_chosen_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it was measured anew; before, the file holds."""
    first = ALIKE[0]
    monkeypatch.setattr(measuring, "time_steps", lambda facts, products, library, kv_cache_dtype: None)

    def chosen(libraries: Sequence[Built], *, anew: bool) -> set[str]:
        monkeypatch.setattr(measuring, "load_alike", lambda dtype, compile_missing: list(libraries))
        profile, _ = profile_here(SMALL, dtype="bfloat16", quantization="int8", anew=anew)
        assert read_profile(profile.key) == profile
        return {choice.library for product in profile.products for choice in product.choices}

    assert chosen([first, delayed(twin(first))], anew=False) == {first.instruction_set.name}
    assert chosen([delayed(first), twin(first)], anew=False) == {first.instruction_set.name}
    assert chosen([delayed(first), twin(first)], anew=True) == {"twin"}


@NATIVE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whatever_is_chosen_gives_the_same_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    alike = load_alike(dtype)
    ruled = NativeLibrary(alike[0], 1, dtype)
    dense = torch.randn(128 * 64).to(dtype)
    x_TI = torch.randn(70, 64).to(dtype)
    for built in alike:
        library = NativeLibrary(alike[0], 2, dtype)
        for bits in (4, 8, 8 * dtype.itemsize):
            own, other = (RowsChoice(rows=n, library=name, seconds={}, noisy=False) for n, name in mixed(alike[0], built))
            choices = MeasuredProduct(name="qkv", bits=bits, inputs=64, outputs=128, choices=(own, other))
            library.prefer([choices], alike)
        for rows in (1, 3, 4, 5, 70):
            one, another = (each.dense_product(x_TI[:rows], dense, 128, dtype) for each in (ruled, library))
            assert torch.equal(one, another)
            for bits in (4, 8):
                records = Product("qkv", bits, 64, 128).weight(dtype)
                one, another = (each.quantized_product(x_TI[:rows], records, 128, bits, dtype) for each in (ruled, library))
                assert torch.equal(one, another)


def mixed(first: Built, other: Built) -> tuple[tuple[int, str], tuple[int, str]]:
    return (1, first.instruction_set.name), (4, other.instruction_set.name)


@NATIVE
def test_rows_go_to_the_library_that_was_chosen_for_them() -> None:
    first = ALIKE[0]
    called: list[tuple[str, int]] = []

    def counting(built: Built) -> Built:
        class Counting(Delayed):
            def __getattr__(self, name: str) -> Any:
                def count(*arguments: Any) -> None:
                    called.append((built.instruction_set.name, arguments[3]))

                self.__dict__[name] = count
                return count

        return Built(built.instruction_set, Counting(None))

    alike = [counting(first), counting(twin(first))]
    library = NativeLibrary(alike[0], 1, torch.bfloat16)
    chosen = (("twin", 1), (first.instruction_set.name, 4), ("gone", 16), ("twin", 64))
    choices = tuple(RowsChoice(rows=rows, library=name, seconds={}, noisy=False) for name, rows in chosen)
    product = PRODUCTS[0]
    library.prefer([MeasuredProduct(name="qkv", bits=4, inputs=64, outputs=128, choices=choices)], alike)
    for rows in (1, 3, 4, 15, 16, 63, 64, 500):
        product.multiply(library, torch.ones(rows, 64, dtype=torch.bfloat16), product.weight(torch.bfloat16))
    own = first.instruction_set.name
    assert called == [("twin", 1), ("twin", 3), (own, 4), (own, 15), (own, 16), (own, 63), ("twin", 64), ("twin", 500)]


@NATIVE
@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_the_products_are_those_that_a_model_multiplies(
    smollm2_facts: ModelFacts, monkeypatch: pytest.MonkeyPatch, quantization: Quantization
) -> None:
    assert multiplied(smollm2_facts, quantization, monkeypatch) == expected(smollm2_facts, quantization)


@NATIVE
@pytest.mark.parametrize("kind", ["llama-wide", "qwen3", "llama"])
@pytest.mark.parametrize("quantization", ["auto", "int4", "none"])
def test_the_products_of_small_models(
    small_model: Callable[[str], SmallModel], monkeypatch: pytest.MonkeyPatch, kind: str, quantization: Quantization
) -> None:
    """Also where shapes do not divide into what the operators pack."""
    facts = small_model(kind).facts
    assert multiplied(facts, quantization, monkeypatch) == expected(facts, quantization)


def expected(facts: ModelFacts, quantization: str) -> set[tuple[int, int, int]]:
    products = products_of(facts, torch.bfloat16, quantization, ranks=1)
    return {(product.bits, product.inputs, product.outputs) for product in products}


def multiplied(facts: ModelFacts, quantization: Quantization, monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int, int]]:
    """Bits, inputs and outputs of all products of a step."""
    runner = ModelRunner.load(facts, dtype="bfloat16", block_size=16, num_kv_tokens=32, quantization=quantization)
    found: set[tuple[int, int, int]] = set()
    real = NativeLibrary._product

    def product(self: NativeLibrary, name: str, bits: int, inputs: int, outputs: int, rows: int) -> Any:
        found.add((bits, inputs, outputs))
        return real(self, name, bits, inputs, outputs, rows)

    monkeypatch.setattr(NativeLibrary, "_product", product)
    runner.execute([Chunk([1, 2, 3], 0, [0], SamplingParams(seed=0, max_tokens=1), 0)])
    return found


@NATIVE
def test_ranks_multiply_their_share() -> None:
    """The head's is a third of the vocabulary, in whole steps of 64 tokens."""
    facts = tiny_facts("ranks", num_heads=6, num_kv_heads=3, head_dim=64, intermediate_size=96, vocab_size=600)
    shares = {product.name: (product.inputs, product.outputs) for product in products_of(facts, torch.bfloat16, "none", 3)}
    assert rank_facts(facts, 3).intermediate_size == 32
    assert shares == {"qkv": (64, 256), "output": (128, 64), "gate_up": (64, 64), "down": (32, 64), "head": (64, 192)}


@NATIVE
@pytest.mark.usefixtures("own_cache")
def test_a_worker_reads_what_was_measured(small_model: Callable[[str], SmallModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """And its arithmetic keeps its name, whatever was chosen."""
    facts, given = small_model("llama-wide").facts, []
    before = ModelRunner.load(facts, dtype="bfloat16", block_size=16, num_kv_tokens=32)
    profile, measured_here = profile_here(facts, dtype="bfloat16", quantization="auto")
    assert measured_here
    real = NativeLibrary.load

    def load(threads: int, dtype: torch.dtype, measured: Sequence[MeasuredProduct] = ()) -> NativeLibrary | None:
        given.append(measured)
        return real(threads, dtype, measured)

    monkeypatch.setattr(NativeLibrary, "load", load)
    after = ModelRunner.load(facts, dtype="bfloat16", block_size=16, num_kv_tokens=32)
    assert given == [profile.products]
    assert after.arithmetic == before.arithmetic
    assert ModelRunner.load(facts, dtype="bfloat16", block_size=16, num_kv_tokens=32, quantization="int8")
    assert given[1:] == [()], "of another form of the weights"


@NATIVE
@pytest.mark.slow
def test_two_workers_that_start_together_agree(own_cache: Path) -> None:
    """Two processes that measure with the real operators: one does, the other waits and reads."""
    code = """
import torch
from engine.profiling.measure import profile_here
from tests.unit.engine.test_profiling import SMALL
torch.set_num_threads(1)
profile, mine = profile_here(SMALL, dtype="bfloat16", quantization="int8")
print(mine, hash(profile.model_dump_json().encode()))
"""
    command, environment = [sys.executable, "-c", code], os.environ | {"PYTHONHASHSEED": "0"}
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    said = [process.communicate(timeout=120)[0].split() for process in processes]
    assert sorted(mine for mine, _ in said) == ["False", "True"]
    assert len({profile for _, profile in said}) == 1
    assert len(list((own_cache / "profiles").glob("*.json"))) == 1


@NATIVE
def test_noise_leaves_the_sizes_of_steps_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    library = NativeLibrary.load(1, torch.bfloat16)
    assert library is not None
    products = products_of(SMALL, torch.bfloat16, "int8", ranks=1)
    monkeypatch.setattr(timing, "MOST_SPREAD", math.inf)
    assert timing.time_steps(SMALL, products, library) is not None
    monkeypatch.setattr(timing, "MOST_SPREAD", 0.0)
    assert timing.time_steps(SMALL, products, library) is None


@NATIVE
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_steps_are_timed_with_kv_of_ordinary_numbers(kv_cache_dtype: KvCacheDtype) -> None:
    """Denormal ones would take longer."""
    library = NativeLibrary.load(1, torch.bfloat16)
    assert library is not None
    model = timing._MadeUpModel(SMALL, products_of(SMALL, torch.bfloat16, "int8", ranks=1), library, kv_cache_dtype)
    numbers = model._runner(2, 64).pool.read(1, torch.arange(64)).abs()
    assert ((numbers > 0.1) & (numbers <= 1.0)).all()


@NATIVE
@pytest.mark.parametrize(("windows", "expected"), [((32,), (32, 32)), ((0, 32, 64), (0, 32, 64)), ((), ())])
def test_steps_are_timed_with_the_windows_of_the_layers(windows: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Two layers are computed, even if the model has one."""
    library = NativeLibrary.load(1, torch.bfloat16)
    assert library is not None
    facts = replace(SMALL, num_layers=len(windows) or 1, sliding_windows=windows)
    model = timing._MadeUpModel(facts, products_of(facts, torch.bfloat16, "int8", ranks=1), library, "auto")
    step = model.decode(1, 128)
    assert step.several.facts.sliding_windows == expected
    assert step.once() > 0


@NATIVE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_of_a_model_whose_widths_fill_no_parts_are_timed(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(timing, "MOST_SPREAD", math.inf)
    odd = replace(SMALL, hidden_size=SMALL.hidden_size + 16, intermediate_size=SMALL.intermediate_size + 16)
    products = products_of(odd, dtype, "none", 1)
    assert any(product.inputs not in (odd.hidden_size, odd.intermediate_size) for product in products)
    assert timing.time_steps(odd, products, NativeLibrary(load_alike(dtype)[0], 1, dtype)) is not None


@pytest.mark.usefixtures("own_cache")
def test_a_model_is_measured_whose_unknown_scaling_is_overridden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement that fails is never tried again, and the cluster would compute slowly for good."""
    facts = tiny_facts("longrope", vocab_size=BYTE_TOKENS)
    saved(random_model(facts, seed=1), facts, tmp_path)
    save_byte_tokenizer(tmp_path)
    declared = json.loads((tmp_path / "config.json").read_text()) | {"rope_parameters": {"rope_type": "longrope"}}
    (tmp_path / "config.json").write_text(json.dumps(declared))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    served = resolve_for(ClusterConfig(model=str(tmp_path), hf_overrides={"rope_parameters": yarn})).facts
    monkeypatch.setattr(measuring, "load_alike", lambda dtype, compile_missing: [])
    monkeypatch.setattr(sys, "argv", ["measure", str(tmp_path), "--threads", "1"])
    measuring.main()
    assert read_profile(profile_key(served, dtype="auto", quantization="auto", ranks=1, threads=1)) is not None


@pytest.mark.usefixtures("own_cache")
def test_without_native_operators_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """And that is kept, so that no later start tries."""
    monkeypatch.setattr(measuring, "load_alike", lambda dtype, compile_missing: [])
    profile, measured_here = profile_here(SMALL, dtype="float32", quantization="auto")
    assert measured_here
    assert (profile.products, profile.prefill, profile.sizes) == ((), (), None)
    assert profile_here(SMALL, dtype="float32", quantization="auto") == (profile, False)


def test_another_set_by_name_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    if (built := load_library(torch.bfloat16)) is None:
        pytest.skip("needs native operators")
    facts = {"dtype": "auto", "quantization": "auto", "ranks": 1, "threads": 1}
    plain = profile_key(SMALL, **facts)  # type: ignore[arg-type]
    monkeypatch.setenv("TANDEM_NATIVE", built.instruction_set.name)
    assert [built.instruction_set.file_name in name for name in profile_key(SMALL, **facts).libraries] == [True]  # type: ignore[arg-type]
    assert len(plain.libraries) >= 1


@pytest.mark.usefixtures("own_cache")
def test_a_compiler_that_comes_later_has_everything_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as bare:
        bare.setattr("engine.profiling.key.can_be_had", lambda: False)
        bare.setattr(measuring, "load_alike", lambda dtype, compile_missing: [])
        before, _ = profile_here(SMALL, dtype="float32", quantization="auto")
        assert before.key.libraries == ()
    monkeypatch.setattr("engine.profiling.key.can_be_had", lambda: True)
    monkeypatch.setattr(measuring, "measure", lambda facts, key, dtype, alike: before.model_copy(update={"key": key}))
    after, measured_here = profile_here(SMALL, dtype="float32", quantization="auto")
    assert measured_here
    assert len(after.key.libraries) >= 1


def test_a_key_needs_no_torch() -> None:
    code = "import sys, cluster.measured; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


times = st.floats(1e-6, 10.0)
rounds_of = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.lists(times, min_size=5, max_size=5), min_size=1)


@given(rounds_of)
def test_the_first_that_is_as_good_as_the_fastest_is_chosen(rounds: Rounds) -> None:
    choice = choose(4, rounds)
    names = list(rounds)
    assert (choice.rows, set(choice.seconds)) == (4, set(rounds))
    assert choice.noisy == noisy(rounds)
    if choice.noisy:
        assert choice.library == names[0]
        return
    limit = TIE * min(choice.seconds.values())
    assert choice.seconds[choice.library] <= limit
    assert all(choice.seconds[name] > limit for name in names[: names.index(choice.library)])


@given(times, times)
def test_a_tie_goes_to_the_rule(first_s: float, second_s: float) -> None:
    choice = choose(1, {"rule": [first_s] * 5, "other": [second_s] * 5})
    assert choice.library == ("other" if first_s > TIE * second_s else "rule")


def test_one_round_of_five_that_was_disturbed_is_no_noise() -> None:
    assert not noisy({"a": [1.0, 1.01, 9.0, 1.02, 0.99]})
    assert noisy({"a": [1.0] * 5, "b": [1.0, 1.5, 1.0, 1.6, 1.1]})
    assert not noisy({"a": [1.0] * 5, "b": [2.0, 3.5, 2.0, 3.6, 2.1]}), "whatever it is, it is slower"


@given(st.floats(1e-5, 0.1), st.floats(0, 0.1), st.integers(1, len(timing.PREFILL_TOKENS)))
def test_sizes_of_steps_are_those_that_were_measured(token_s: float, base_s: float, number: int) -> None:
    prefill_s = {tokens: base_s + token_s * tokens for tokens in timing.PREFILL_TOKENS[:number]}
    sizes = step_sizes(prefill_s)
    assert sizes.max_batch_tokens in BATCH_TOKENS
    assert sizes.max_chunk_tokens in CHUNK_TOKENS
    assert sizes.saturation_tokens <= sizes.max_batch_tokens
    assert sizes.max_batch_tokens in prefill_s or sizes.max_batch_tokens == min(BATCH_TOKENS)
    assert sizes.max_chunk_tokens in prefill_s or sizes.max_chunk_tokens == min(CHUNK_TOKENS)


def test_the_shipped_sizes_are_those_of_the_machine_they_were_tuned_on() -> None:
    """Its step times are those of `simulator/laptop.json`: one core of an AMD EPYC."""
    laptop = {16: 0.0128, 32: 0.0219, 64: 0.0398, 128: 0.0703, 256: 0.1405, 512: 0.2796}
    sizes = step_sizes(laptop)
    assert (sizes.max_batch_tokens, sizes.max_chunk_tokens) == (256, 64)
    assert MOST_SPREAD < 1
