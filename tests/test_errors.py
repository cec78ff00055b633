"""What a user reads of findings and refusals."""

from hook.errors import DomainXmlTooLarge, Finding, HookError, Severity, StrictRefusal


def test_a_finding_is_one_line_with_its_subject() -> None:
    finding = Finding(Severity.WARNING, "no-cell", "gpu0", "no guest cell stands for host node 2")

    assert str(finding) == "warning [no-cell] gpu0: no guest cell stands for host node 2"


def test_a_finding_about_the_whole_vm_has_no_subject() -> None:
    assert str(Finding(Severity.INFO, "no-devices", "", "there are none")) == "info [no-devices] there are none"


def test_a_refusal_gives_every_reason_in_one_line() -> None:
    findings = [
        Finding(Severity.WARNING, "no-cell", "gpu0", "no guest cell stands for host node 2"),
        Finding(Severity.WARNING, "no-aligned-cell", "", "there is no cell"),
    ]
    refusal = StrictRefusal(findings)

    assert refusal.findings == tuple(findings)
    assert str(refusal) == (
        "policy strict refuses this VM: gpu0: no guest cell stands for host node 2 [no-cell]; "
        "VM: there is no cell [no-aligned-cell]"
    )


def test_everything_raised_on_purpose_has_one_base() -> None:
    assert issubclass(DomainXmlTooLarge, HookError)
    assert issubclass(StrictRefusal, HookError)
