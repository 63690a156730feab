"""HTTP below the API: keys, body limits, errors, server-sent events."""
