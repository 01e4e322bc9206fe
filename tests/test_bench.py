"""The speed benchmark's arithmetic, verdicts and files. `make bench` measures its figures."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from bench import __main__ as command
from bench import callers, formats, fresh, gpu, host, layouts, peers, release, speed
from bench.peers import Contender, Runner
from bench.speed import QUICK, BaselineError, Comparison, Plan, blaming_baseline, race, rounds_of
from bench.speed_picture import draw
from bench.speed_rows import HEADER, Goal, Row, table

CPU = torch.device("cpu")
SHAPES = [(64, 128)]
PEERS = ("torchao", "bitsandbytes", "heavyball", "torch-optimi")
ANSWERS = {"first-step": 41.0, "memory": 3 * 2**20}


def skipped(package: str) -> str:
    return f"skipped: {package} is not installed; pip install -e '.[bench]' adds it"


def stepping_by(change: float, shapes: peers.Shapes, device: torch.device) -> Runner:
    """A contender that only adds to its weights."""
    weight = torch.zeros(shapes[0], device=device)
    return Runner([weight], lambda: None, lambda: weight.add_(change))


OURS = Contender("ours", partial(stepping_by, 1.0))
THEIRS = Contender("theirs", partial(stepping_by, 2.0))


def compare(baseline: Contender, ours: Contender = OURS) -> Row:
    return race(Comparison("work", SHAPES, ours, baseline, goal=4.0), QUICK, CPU)


@pytest.fixture
def unchanged_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FlashAdamW", "FlashSGD", "FlashLion"):
        monkeypatch.setattr(peers, name, partial(getattr(peers, name), eager=True))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(fresh, "ask", lambda question, *_, **__: ANSWERS[question])


@pytest.mark.usefixtures("nothing_compiles", "unchanged_threads")
def test_quick_run_without_peers_writes_its_files_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(Contender, "is_installed", property(lambda contender: not contender.package))
    monkeypatch.setattr(speed, "chosen_device", lambda: CPU)
    command.main(["speed", "--quick", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert f"| {' | '.join(HEADER)} |" in lines
    assert [line for line in lines if line.startswith("skipped:")] == [skipped(package) for package in PEERS]
    assert (tmp_path / "speed.png").stat().st_size > 10_000

    (path,) = tmp_path.glob("????-??-??.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found.keys() == {"date", "quick", "machine", "device", "threads", "wait_policy", "versions", "rows"}
    assert (found["date"], found["quick"], found["threads"]) == (path.stem, True, 2)
    assert found["versions"]["torch"] == torch.__version__
    names = set(Row.__dataclass_fields__) | {"value", "passed"}
    assert all(row.keys() == names for row in found["rows"])
    races, (growth, later, cold, warm, memory) = found["rows"][:-5], found["rows"][-5:]
    measured = [row for row in races if not row["note"]]
    assert len(measured) == len(races) - len(PEERS) == 6
    for row in measured:
        assert row["value"] == row["baseline_ms"] / row["ours_ms"] and row["rounds"] == QUICK.least_rounds
        assert row["passed"] == (row["value"] >= row["goal"]["limit"] if row["goal"] else None)
    assert growth["minima_ms"].keys() == later["minima_ms"].keys() == {str(elements) for elements in QUICK.growth}
    assert (cold["value"], cold["unit"], cold["passed"]) == (41.0, "s", False)
    assert (warm["value"], warm["passed"]) == (41.0, False)
    assert (memory["value"], memory["unit"], memory["passed"]) == (3.0, "MiB", True)


def test_ratio_compares_minimum_times_of_interleaved_rounds(monkeypatch: pytest.MonkeyPatch):
    times = iter([4.0, 9.0, 2.0, 16.0, 3.0, 8.0])  # ours and theirs in turn
    monkeypatch.setattr(speed, "timed_ms", lambda runner, device: next(times))
    comparison = Comparison("work", SHAPES, OURS, THEIRS, goal=4.0)
    row = race(comparison, Plan(least_rounds=3, most_rounds=3), CPU)
    assert (row.ours_ms, row.baseline_ms, row.value, row.rounds, row.verdict) == (2.0, 8.0, 4.0, 3, "pass")


def test_growth_is_the_largest_time_per_element_over_the_smallest(monkeypatch: pytest.MonkeyPatch):
    """Only the first step of each turn has a goal. The others have a row without one."""
    monkeypatch.setattr(speed, "STEPS_AFTER_THE_FIRST", 2)
    # minima: 6 ms for 2^13 elements and 8 ms for 2^15; in later steps 2 and 8
    times = iter([7.0, 4.0, 3.0, 8.0, 8.0, 9.0, 6.0, 2.0, 3.0, 8.0, 9.0, 9.0])
    monkeypatch.setattr(speed, "timed_ms", lambda runner, device: next(times))
    monkeypatch.setattr(peers, "OUR_ADAMW", OURS)
    row, later = speed.growth(QUICK, CPU)
    assert row.value == 3.0 and row.minima_ms == {"8192": 6.0, "32768": 8.0} and row.has_passed is False
    assert later.value == 1.0 and later.minima_ms == {"8192": 2.0, "32768": 8.0} and later.verdict == "–"


def test_growth_says_which_sizes_do_not_fit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "OUR_ADAMW", OURS)
    monkeypatch.setattr(speed, "free_bytes", lambda device: speed.BYTES_PER_ELEMENT * QUICK.growth[0])
    row, _ = speed.growth(QUICK, CPU)
    assert row.minima_ms.keys() == {"8192"} and "without 0.0312M" in row.note


@pytest.mark.parametrize(
    ("goal", "value", "verdict"),
    [
        (Goal("≥", 1.0), 1.0, "pass"),
        (Goal("≥", 1.0), 0.9999, "FAIL"),
        (Goal("≤", 1.15), 1.15, "pass"),
        (Goal("≤", 1.15), 1.1501, "FAIL"),
        (None, 0.5, "–"),
    ],
)
def test_verdict_follows_from_the_unrounded_value(goal: Goal | None, value: float, verdict: str):
    assert Row("work", "baseline", goal, figure=value).verdict == verdict


def test_table_shows_times_ratio_goal_and_verdict():
    rows = [
        Row("A", "B", Goal("≥", 20.0), baseline_ms=1500.0, ours_ms=30.0),
        Row("first step", goal=Goal("≤", 40.0), ours_ms=12_500.0, figure=12.5, unit="s"),
        Row("A", "C", Goal("≥", 0.6), note=skipped("c")),
    ]
    lines = table(rows).splitlines()
    assert lines[2] == "| A | B | 1,500.00 | 30.00 | 50.0× | ≥ 20× | pass |"
    assert lines[3] == "| first step | – | – | 12,500.00 | 12.5 s | ≤ 40 s | pass |"
    assert lines[4] == "| A | C | – | – | – | ≥ 0.6× | skipped |"
    assert lines[5:] == ["", skipped("c")]


def test_absent_package_is_skipped():
    row = compare(Contender("theirs", THEIRS.build, "no-such-package", "no_such_module"))
    assert row.note == skipped("no-such-package") and row.value is None and row.verdict == "skipped"


def test_baseline_that_raises_fails_in_one_line():
    def build(shapes: peers.Shapes, device: torch.device) -> Runner:
        raise ValueError("no kernel\nfor this device")

    assert compare(Contender("theirs", build)).note == "failed: theirs: ValueError: no kernel"


def test_baseline_that_moves_nothing_fails():
    row = compare(Contender("theirs", partial(stepping_by, 0.0)))
    assert row.note == "failed: theirs: RuntimeError: step 2 has changed no weight" and row.verdict == "failed"


def test_our_own_failure_is_an_error():
    with pytest.raises(RuntimeError, match="changed no weight"):
        compare(THEIRS, ours=Contender("ours", partial(stepping_by, 0.0)))


def test_interruption_is_not_blamed_on_a_baseline():
    with pytest.raises(KeyboardInterrupt), blaming_baseline():
        raise KeyboardInterrupt
    with pytest.raises(BaselineError, match="KeyError"), blaming_baseline():
        raise KeyError("lr")


def test_rounds_end_when_time_is_up_but_not_before_the_least_rounds():
    assert len(list(rounds_of(Plan(least_rounds=2, most_rounds=5, seconds=0.0)))) == 2
    assert len(list(rounds_of(Plan(least_rounds=2, most_rounds=5, seconds=60.0)))) == 5


def test_network_has_300_tensors():
    assert len(peers.resnet_shapes(speed.FULL.convolutions)) == 300


def test_mixed_scheme_steps_masters_and_rounds_them_to_the_weights():
    runner = peers.MIXED_SGD.build(SHAPES, CPU)
    before, (weight,) = runner.weights[0].detach().clone(), runner.weights
    runner.renew()
    runner.step()
    assert weight.grad is not None
    expected = before.float() - peers.SGD["lr"] * weight.grad.float()
    assert torch.equal(weight.detach(), expected.to(torch.bfloat16))


@pytest.mark.skipif(not fresh.CLEAR_REFS.exists(), reason="needs Linux's high-water mark of memory")
def test_extra_memory_includes_memory_that_a_step_frees():
    def step() -> None:
        torch.ones(8, 2**20)

    step()  # lets the C library keep the freed memory, if it does so
    extra_bytes = fresh.extra_bytes(step, CPU)
    assert extra_bytes is not None and 30 * 2**20 <= extra_bytes <= 40 * 2**20


def test_memory_is_counted_beside_an_empty_process(monkeypatch: pytest.MonkeyPatch):
    def ask(name: str, width: int, layers: int) -> int:
        """A process of 1000 bytes, and 16 bytes per parameter more, or 7."""
        return 1000 + (16 if "torch" in name else 7) * width**2 * layers

    monkeypatch.setattr(release, "ask", ask)
    torch_adamw, *ours = release.memory_rows(release.FULL)
    assert release.FULL.parameters == 100_663_296
    assert torch_adamw.value == 16 and [row.value for row in ours] == [7, 7]
    assert all("FlashAdamW" in row.work for row in ours) and "an empty process" in ours[0].note


@pytest.mark.skipif(not fresh.CLEAR_REFS.exists(), reason="needs Linux's high-water mark of memory")
def test_a_process_tells_its_peak_and_released_gradients_lower_it():
    names = list(release.WAYS)[1:]
    release.ask(names[0], *release.EMPTY)  # a process that compiles keeps more memory than one that finds the kernel
    kept, released = (release.ask(name, 1024, 16) for name in names)
    assert 1.5 < (kept - released) / (1024 * 1024 * 16) < 2.5


def test_steps_with_released_gradients_are_timed_beside_ordinary_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(release, "FlashAdamW", partial(release.FlashAdamW, eager=True))
    rows = release.time_rows(release.QUICK)
    assert [row.work.rpartition(", ")[2] for row in rows] == [
        "not clipped",
        "clip_mode='previous'",
        "clip_mode='exact'",
    ]
    assert all(row.value == row.baseline_ms / row.ours_ms for row in rows if row.baseline_ms and row.ours_ms)
    assert all(row.value for row in rows)


def test_picture_draws_any_outcome(tmp_path: Path):
    rows = [
        Row("A", "B", Goal("≥", 1.0), 3.0, 2.0),
        Row("A", "C", Goal("≥", 20.0), note=skipped("c")),
        Row("D", "E", None, 1.0, 500.0),
        Row("growth", goal=Goal("≤", 1.15), figure=1.1),
    ]
    draw(rows, "a machine", tmp_path / "new" / "speed.png")
    draw(rows[1:2], "a machine", tmp_path / "none.png")
    assert (tmp_path / "new" / "speed.png").exists() and (tmp_path / "none.png").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["speed", "layouts", "callers", "release", "host", "gpu", "formats"]),
        (["speed"], ["speed"]),
        (["callers"], ["callers"]),
        (["release"], ["release"]),
        (["formats"], ["formats"]),
        (["host"], ["host"]),
        (["gpu", "--device", "cpu"], ["gpu"]),
    ],
)
def test_command_runs_what_it_is_asked_for(arguments: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch):
    ran: list[str] = []

    def missed_goal() -> None:
        ran.append("formats")
        raise SystemExit(1)

    monkeypatch.setattr(speed, "main", lambda quick, out: ran.append("speed"))
    monkeypatch.setattr(layouts, "main", lambda quick: ran.append("layouts"))
    monkeypatch.setattr(callers, "main", lambda quick: ran.append("callers"))
    monkeypatch.setattr(release, "main", lambda quick: ran.append("release"))
    monkeypatch.setattr(formats, "main", missed_goal)
    monkeypatch.setattr(host, "main", lambda quick, out: ran.append("host"))
    monkeypatch.setattr(gpu, "main", lambda quick, out, device: ran.append("gpu"))
    command.main(arguments)
    assert ran == expected


@pytest.mark.usefixtures("nothing_compiles", "unchanged_threads")
def test_a_gpus_first_run_can_be_tried_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(Contender, "is_installed", property(lambda contender: not contender.package))
    monkeypatch.setattr(gpu, "RULES", {name: partial(make, eager=True) for name, make in gpu.RULES.items()})
    command.main(["gpu", "--device", "cpu", "--quick", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("skipped: f")] == [skipped("flashoptim")] * 2
    assert skipped("torchao") in lines and skipped("bitsandbytes") in lines
    assert (tmp_path / "gpu.png").stat().st_size > 10_000
    found = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert found["device"] == "CPU" and found["quick"]
    equal = [row for row in found["rows"] if "differ from the CPU's" in row["work"]]
    assert len(equal) == 6 and all(row["value"] == 0.0 and row["passed"] for row in equal)
    raced = [row["baseline"] for row in found["rows"] if row["baseline"] != "–" and row["value"]]
    assert raced[:3] == ["torch AdamW, fused, all fp32", "torch AdamW, fused, all bf16", "torch AdamW, foreach, mixed"]


def test_a_gpu_that_steps_otherwise_is_found_out():
    one, other = (gpu.stepped(partial(gpu.FlashLion, eager=True), [(64, 64), (7,)], CPU) for _ in range(2))
    assert set(gpu.differences(one, other).values()) == {0.0}
    weight, bias = one.param_groups[0]["params"]
    with torch.no_grad():
        bits = bias.view(torch.int16)
        bits[2] += 3
        one.state[weight]["m.codes"][0, 0] += 2
    found = gpu.differences(one, other)
    assert (found["head by"], found["code by"]) == (3.0, 2.0)
    assert found["head"] == 1 / (64 * 64 + 7) and 1 / 5000 < found["code"] < 1 / 4000


def test_without_a_gpu_its_bench_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(gpu, "chosen_device", lambda: CPU)
    command.main(["gpu"])
    assert "there is no GPU here" in capsys.readouterr().out


@pytest.mark.usefixtures("unchanged_threads")
def test_host_time_per_parameter_is_the_slope_between_two_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(host, "ours_us", lambda shapes, steps: 20.0 + 3.0 * len(shapes))
    monkeypatch.setattr(host, "theirs_us", lambda shapes, steps, how: 10.0 + 5.0 * len(shapes))
    monkeypatch.setattr(host, "launches", lambda shapes: {"CUDA 13": 4, "CUDA 12, ROCm": 16})
    command.main(["host", "--quick", "--out", str(tmp_path)])
    rows = {row["work"]: row for row in json.loads((tmp_path / "host.json").read_text(encoding="utf-8"))["rows"]}
    large = rows["host time per large parameter, bound launches"]
    assert large["value"] == 3.0 and large["passed"] and "20 µs of it once" in large["note"]
    assert rows["host time per large parameter, torch AdamW, fused"]["value"] == 5.0
    assert rows["launches of a step, 4 tensors of 64×64, torch for CUDA 12, ROCm"]["passed"] is False
    assert "4 launches (torch for CUDA 13)" in capsys.readouterr().out


def test_the_host_time_of_torchs_adamw_is_measured_without_its_kernels():
    before = torch.get_num_threads()
    for how in ("fused", "foreach"):
        assert 0 < host.theirs_us([(8, 8)] * 3, 3, how) < 1e5
    assert torch.get_num_threads() == before
