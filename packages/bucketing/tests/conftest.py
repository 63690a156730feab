"""Property tests have no deadline, because a busy machine takes longer."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
