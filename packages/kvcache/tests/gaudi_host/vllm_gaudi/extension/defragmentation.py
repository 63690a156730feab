"""Has the class that is replaced."""


class OnlineDefragmenter:
    """The plugin's."""
