# ruff: noqa
# fmt: off
# mypy: ignore-errors
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Round(_message.Message):
    __slots__ = ("readings", "fault", "source")
    READINGS_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    readings: _containers.RepeatedCompositeFieldContainer[Reading]
    fault: str
    source: str
    def __init__(self, readings: _Optional[_Iterable[_Union[Reading, _Mapping]]] = ..., fault: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class Reading(_message.Message):
    __slots__ = ("device", "temperature_c", "power_w", "age_s")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_C_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    device: int
    temperature_c: float
    power_w: float
    age_s: float
    def __init__(self, device: _Optional[int] = ..., temperature_c: _Optional[float] = ..., power_w: _Optional[float] = ..., age_s: _Optional[float] = ...) -> None: ...
