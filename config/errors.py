"""The one exception a user's mistake becomes."""


class ConfigError(Exception):
    """A mistake in what the user wrote, found before any device or process group is touched.

    The message is complete: where (file or command line), which key, its value, the rule it breaks and the fix.
    Entry points print it as it is and exit with code 2, without a traceback.
    """
