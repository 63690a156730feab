"""``thermal-sidecar``: one process reads the sensors of a node, and engines receive the readings.

For engines without access to the driver (containers without the device's management library), and
for tensor-parallel groups on several nodes. Needs the extra ``sidecar``.
"""
