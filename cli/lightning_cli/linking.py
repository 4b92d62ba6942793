"""Links between arguments, applied to settings and removed from configurations."""

from __future__ import annotations

from collections.abc import Mapping

from ..config import Value
from .checker import SettingsChecker, look_up
from .declarations import ClassGroup, Declared, Link, find_owner
from .namespace import Namespace
from .settings import as_mapping, find_value, make_settings, place, remove_value


def apply_link(
    declared_by_key: Mapping[str, Declared],
    checker: SettingsChecker,
    link: Link,
    key: str,
    section: Value | None,
    configs: Namespace,
) -> Value | None:
    """Return the settings of an option or group with the value of a link set at the link's target.

    If the link is applied at instantiation, the target is removed instead. A problem is reported if the target is an
    argument of a class and is also set in another way.
    """
    declared, path = declared_by_key[key], link.path[len(key.split(".")) :]
    given = None if section is None else find_value(section, path)
    sources = " and ".join(f"--{source}" for source in link.sources)
    if given is not None and path and given.source not in ("linked", "configuration", "default"):
        noun = "source" if len(link.sources) == 1 else "sources"
        checker.report(given, link.path, f" is set by a link from {sources}. Set the {noun} instead.")
        return section
    if path and isinstance(declared, ClassGroup) and declared.subclass_mode:
        if section is None or section.data is None:
            return section
        if len(path) == 1 and declared.find_argument(path, as_mapping(section)) is None:
            return section  # the class does not accept the argument
    if link.at_instantiation:
        return remove_value(section, path)
    if any(find_owner(declared_by_key, source) not in configs for source in link.sources):
        return section  # the error in the source has already been reported
    value = link.apply(lambda source: look_up(configs, source))
    new = make_settings(value, "linked")
    return new if not path else place(as_mapping(section), path, new, lambda _: None)


def remove_target(declared_by_key: Mapping[str, Declared], link: Link, config: Namespace) -> None:
    """Remove the value of a link's target from a configuration, in place."""
    key = find_owner(declared_by_key, link.target)
    for name in link.path[len(key.split(".")) :]:  # without the init_args of objects
        key += f".{name}" if f"{key}.init_args" not in config else f".init_args.{name}"
    if key in config:
        del config[key]
