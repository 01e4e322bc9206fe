"""The command `flashopt`: every subcommand explains itself, and a mistake is one line."""

import pytest

from flashopt_compile import cli


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert cli.COMMANDS[command].split()[0] in capsys.readouterr().out.lower()


def test_the_list_of_commands_is_complete(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown and summary in " ".join(shown.split()) for name, summary in cli.COMMANDS.items())


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main(["polish"])
    assert ended.value.code == 2
    assert "polish" in capsys.readouterr().err
