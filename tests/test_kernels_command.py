"""`flashopt kernels`: its table and JSON, the files it keeps, and its errors for wrong input and other versions."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from flashopt_compile import FlashLion, cli
from flashopt_compile.kernels import TARGETS, compile_offline, emit, pretend
from flashopt_compile.kernels.report import KEYS
from flashopt_compile.rules import sgd

pytest.importorskip("triton", reason="pip install -e '.[kernels]'")
ROOT = Path(__file__).parent.parent
OWN_RULE = """
from flashopt_compile import FlashOptimizer, rule

@rule()
def plain(w, g, t, *, lr=1e-3):
    return (w - lr * g,)

class Plain(FlashOptimizer, rule=plain):
    pass

nothing = 3
"""


@pytest.fixture
def own_rule(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN_RULE)
    return path


def test_json_has_a_row_per_target_and_out_keeps_the_files(
    own_rule: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    targets = "sm_80,sm_90,sm_100,gfx942,xpu"
    arguments = ["kernels", "--optimizer", f"{own_rule}:plain", "--target", targets, "--json", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["target"] for row in rows] == targets.split(",")
    for row in rows:
        assert list(row) == list(KEYS)
        assert (row["kernels"], row["temporaries"]) == (1, 0)
        assert (row["read_bytes"], row["written_bytes"]) == (5.0, 3.0)
        assert (row["registers"] is None) == (row["instructions"] is None) == (row["target"] == "xpu")
        assert row["bound_by"].keys() == row["ps_per_element"].keys()
        assert set(row["bound_by"].values()) <= {"memory", "issue", "XU"}
        assert row["spills"] in (0, None)
        assert "@triton.jit" in (tmp_path / row["target"] / "kernel0.py").read_text()
    assert ".target sm_90" in (tmp_path / "sm_90" / "kernel0.ptx").read_text()
    assert "gfx942" in (tmp_path / "gfx942" / "kernel0.amdgcn").read_text()


def test_the_table_says_what_could_not_be_compiled(own_rule: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["kernels", "--optimizer", f"{own_rule}:Plain", "--dtype", "fp32", "--target", "sm_90,xpu"]) == 0
    heading, names, _, nvidia, intel, _, model, devices, _, *judged = capsys.readouterr().out.splitlines()
    assert heading.startswith("plain of weights as ")
    assert {"kernels", "temporaries", "least", "registers", "spills", "widest load"} <= set(
        cell.strip() for cell in names.split("  ")
    )
    assert "128 bit" in nvidia
    assert "emitted only" in intel
    assert model.startswith("A model, no measurement") and devices.split()[:2] == ["device", "target"]
    assert [line.split()[0] for line in judged] == ["H100", "H200"]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--target", "sm_70"], "target is 'sm_70'; allowed are sm_80, sm_90, sm_100, gfx942, xpu."),
        (
            ["--optimizer", "sophia"],
            "--optimizer is 'sophia'; allowed are adamw, adam, sgd, nesterov, lion, or FILE.py:rule.",
        ),
        (["--optimizer", "no.py:rule"], "there is no file 'no.py'."),
        (["--optimizer", "OWN:nothing"], "'nothing' in that file is neither a rule nor an optimizer made of one."),
        (["--parameters", "0"], "--parameters is 0; allowed is at least 1."),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_wrong_input_is_one_line(
    arguments: list[str], sentence: str, own_rule: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = [argument.replace("OWN", str(own_rule)) for argument in arguments]
    assert cli.main(["kernels", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("flashopt kernels: ")
    assert error.endswith(f"{sentence}\n")
    assert error.count("\n") == 1


def test_an_invalid_shape_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["kernels", "--shape", "4096,x"])
    assert "is '4096,x'; allowed are whole numbers" in capsys.readouterr().err


def test_the_triton_of_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(pretend.TRITONS, pretend._minor(torch.__version__), "3.1")
    assert cli.main(["kernels"]) == 2
    error = capsys.readouterr().err
    found = metadata.version("triton")
    assert f"triton is {found}" in error and "checked with triton 3.1 for torch" in error
    with pytest.raises(pretend.UncheckedVersion):
        emit(sgd.sgd)


def test_an_unknown_torch_may_have_any_triton(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pretend, "TRITONS", {})
    assert emit(sgd.sgd, shapes=[(64, 64)]).kernels


def test_what_a_new_torch_lacks_is_named_in_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr("torch._inductor.scheduler.has_triton")
    with pytest.raises(pretend.UncheckedVersion, match=r"cannot be made to believe in a GPU.*has_triton"):
        emit(sgd.sgd)


def test_the_error_for_a_missing_triton_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    def missing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(pretend.UncheckedVersion, match=r"triton is not installed; .* pip install 'triton==3\.\d\.\*'"):
        pretend.check_versions()


def test_intel_targets_are_not_compiled():
    emitted = emit(sgd.sgd, "xpu")
    with pytest.raises(ValueError, match="target is 'xpu'; triton's wheel has compilers only for NVIDIA and AMD"):
        compile_offline(emitted)


@pytest.mark.parametrize(
    "options, sentence", [({"shapes": []}, "shapes is empty"), ({"dtype": int}, "dtype is <class 'int'>")]
)
def test_emit_names_the_argument_that_is_wrong(options: dict, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        emit(sgd.sgd, **options)


def test_pretending_leaves_torch_as_it_was():
    before = torch.version.hip, torch.cuda.get_device_properties, torch.cuda.current_device
    for target in TARGETS.values():
        with pretend.gpu(target):
            pass
    assert (torch.version.hip, torch.cuda.get_device_properties, torch.cuda.current_device) == before
    assert not torch.cuda.is_available() or torch.cuda.device_count()


def test_emitting_forgets_nothing_that_training_has_compiled():
    parameter = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    optimizer = FlashLion([parameter])
    optimizer.step()
    torch._dynamo.utils.counters.clear()
    emit(sgd.sgd)
    optimizer.step()
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_training_does_not_import_kernels():
    program = (
        "import sys, torch, flashopt_compile\n"
        "p = torch.nn.Parameter(torch.zeros(4))\np.grad = torch.ones(4)\n"
        "flashopt_compile.FlashAdamW([p], eager=True).step()\n"
        "assert not [name for name in sys.modules if name.startswith('flashopt_compile.kernels')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=600)
