"""The engine's settings, and what derives flags, variables and documentation from settings classes.

The names here are public, for settings classes of other packages.
"""

from trencadis.engine.settings.command_parser import CommandParser, described
from trencadis.engine.settings.flags import (
    add_flags,
    environment_help,
    flag_list,
    format_size,
    from_env,
    given_flags,
    parse_flag,
    parse_gib,
    parse_json_object,
    parse_option,
    parse_size,
    setting,
    setting_field,
    variables_of,
    warn_of_misspelt_variables,
    with_defaults,
)

__all__ = [
    "CommandParser",
    "add_flags",
    "described",
    "environment_help",
    "flag_list",
    "format_size",
    "from_env",
    "given_flags",
    "parse_flag",
    "parse_gib",
    "parse_json_object",
    "parse_option",
    "parse_size",
    "setting",
    "setting_field",
    "variables_of",
    "warn_of_misspelt_variables",
    "with_defaults",
]
