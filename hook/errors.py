"""What can be wrong: findings are values, errors are bytes or files that cannot be used; must not decide policy.

HookError
├── DomainXmlError        the domain XML cannot be used
│   └── DomainXmlTooLarge     … because it is over the limit
├── VmiError              the VMI JSON cannot be used
├── SysfsError            there is no host to read at the given path
├── ManifestError         a file holds no YAML or JSON, or cannot be edited safely
├── ConfigError           a flag, or an annotation under strict, has a bad value
└── StrictRefusal         policy strict: the VM must not start like this
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """INFO is a decision worth knowing; WARNING is a compromise, and strict refuses it."""

    INFO = "info"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One thing that the user should know.

    code: stable, kebab-case, explained in docs/findings.md.
    subject: what it is about: a device NAME, a controller, a cell, an annotation key; empty for
        the whole VM.
    """

    severity: Severity
    code: str
    subject: str
    message: str

    def __str__(self) -> str:
        subject = f"{self.subject}: " if self.subject else ""
        return f"{self.severity} [{self.code}] {subject}{self.message}"


class HookError(Exception):
    """Base of everything that the hook raises on purpose; its text is one line for users."""


class DomainXmlError(HookError):
    """The domain XML is empty, malformed or not a libvirt domain."""


class DomainXmlTooLarge(DomainXmlError):
    """The domain XML is larger than the hook can handle within its memory limit."""


class VmiError(HookError):
    """The VMI is not a JSON object."""


class SysfsError(HookError):
    """The path holds no sysfs: it does not exist, cannot be read, or is no recording."""


class ManifestError(HookError):
    """A manifest cannot be read, or cannot be edited without changing something else."""


class ConfigError(HookError):
    """A flag or an annotation has a value that it cannot have."""


class StrictRefusal(HookError):
    """Policy strict refuses the VM; the text names every reason."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__(
            "policy strict refuses this VM: "
            + "; ".join(f"{f.subject or 'VM'}: {f.message} [{f.code}]" for f in findings)
        )
