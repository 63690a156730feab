"""``thermal-sidecar``: one process reads a node's sensors, and engines anywhere watch it.

For engines that may not touch the driver (containers without the device's management library),
and for tensor-parallel groups over several nodes. Needs the extra ``sidecar``.
"""
