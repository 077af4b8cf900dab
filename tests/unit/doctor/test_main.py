# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm.junctions.doctor import __main__ as doctor
from vllm.junctions.doctor.findings import fail, ok


@pytest.mark.parametrize(("failed", "status"), [(False, 0), (True, 1)])
def test_findings_are_printed_and_the_exit_status_tells(
    monkeypatch, capsys, failed, status
):
    found = [ok("a", "fine"), *([fail("b", "bad", "mend")] if failed else [])]
    monkeypatch.setattr(doctor, "findings", lambda args: iter(found))
    monkeypatch.setattr(doctor.logging, "disable", lambda level: None)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert doctor.main([]) == status
    listed, _, summed_up = capsys.readouterr().out.partition("\n\n")
    assert listed.splitlines() == [str(finding) for finding in found]
    assert ("b: bad" in summed_up) == failed


@pytest.mark.parametrize("argv", [["--prompt", "a"], ["--only-servers"], ["--what"]])
def test_a_command_line_that_makes_no_sense_is_refused(argv):
    with pytest.raises(SystemExit) as status:
        doctor.parse_args(argv)
    assert status.value.code == 2


def test_servers_alone_need_nothing_of_this_environment(monkeypatch):
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    args = doctor.parse_args(["--only-servers", "--base-url", "http://127.0.0.1:9"])
    assert [f.subject for f in doctor.findings(args)] == ["http://127.0.0.1:9"]


def test_servers_stand_in_for_the_check_of_the_hash_seed(monkeypatch):
    """What is set here says little where servers tell what is set there."""
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    args = doctor.parse_args(["--base-url", "http://127.0.0.1:9"])
    subjects = [f.subject for f in doctor.findings(args)]
    # Once, and after the server that could not be read.
    assert subjects[-2:] == ["http://127.0.0.1:9", "hash seed"]
    assert subjects.count("hash seed") == 1


def test_without_arguments_every_part_of_the_installation_is_checked(monkeypatch):
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    subjects = [f.subject for f in doctor.findings(doctor.parse_args([]))]
    assert subjects == [
        "versions",
        "Mooncake",
        "hooks",
        "plug-in",
        "hash seed",
        "Mooncake config",
    ]
