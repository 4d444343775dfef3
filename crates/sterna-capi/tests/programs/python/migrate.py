"""Migrates a guest of plain memory between two handles of one process: migrate.py HEADER LIBRARY."""

import json
import mmap
import re
import sys

from cffi import FFI

PAGES = 1024
BYTES = PAGES * 4096


def declarations(path):
    """The header without what only a compiler's preprocessor understands."""
    text = open(path, encoding="utf-8").read()
    text = re.sub(r"#ifdef __cplusplus.*?#endif[^\n]*", "", text, flags=re.S)
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    lines = [line for line in text.splitlines() if not line.startswith("#") or re.match(r"#define \w+ \d+$", line)]
    return "\n".join(lines)


ffi = FFI()
ffi.cdef(declarations(sys.argv[1]))
lib = ffi.dlopen(sys.argv[2])


class SternaError(Exception):
    """An error of the library: its code and its text."""


def call(function, *arguments):
    """Calls a function whose last parameter is the error."""
    error = ffi.new("sterna_error **")
    if function(*arguments, error) != lib.STERNA_OK:
        text = ffi.string(lib.sterna_error_message(error[0])).decode()
        code = lib.sterna_error_code(error[0])
        lib.sterna_error_free(error[0])
        raise SternaError(code, text)


def taken(text):
    """A text of the library, which is freed."""
    copy = ffi.string(text).decode()
    lib.sterna_string_free(text)
    return copy


class Machine:
    """A guest without a vCPU: memory, and a device with a number."""

    def __init__(self):
        self.memory = mmap.mmap(-1, BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.device = 0
        self.runs = False
        self.is_destroyed = False
        self.keep = []
        name = self.text("ram")
        self.callbacks = ffi.new(
            "sterna_vm_callbacks *",
            {
                "size": ffi.sizeof("sterna_vm_callbacks"),
                "destroy": self.callback("void(void *)", lambda _: setattr(self, "is_destroyed", True)),
                "is_running": self.callback("bool(void *)", lambda _: self.runs),
                "stop": self.callback("int32_t(void *, sterna_failure *)", lambda *_: self.run(False)),
                "resume": self.callback("int32_t(void *, sterna_failure *)", lambda *_: self.run(True)),
                "start": self.callback("int32_t(void *, sterna_failure *)", lambda *_: self.run(True)),
            },
        )
        vm = ffi.new("sterna_vm **")
        call(lib.sterna_vm_new, b"python-1", ffi.NULL, self.callbacks, vm)
        self.vm = vm[0]
        block = {
            "size": ffi.sizeof("sterna_ram_block"),
            "name": name,
            "address": ffi.from_buffer(self.memory),
            "length": BYTES,
            "fd": -1,
        }
        call(lib.sterna_vm_add_ram, self.vm, ffi.new("sterna_ram_block *", block))
        device = {
            "size": ffi.sizeof("sterna_device"),
            "name": self.text("number"),
            "save": self.callback("int32_t(void *, sterna_state *, sterna_failure *)", self.save),
            "load": self.callback("int32_t(void *, uint32_t, uint8_t *, size_t, sterna_failure *)", self.load),
        }
        call(lib.sterna_vm_add_device, self.vm, ffi.new("sterna_device *", device))
        log = {
            "size": ffi.sizeof("sterna_dirty_log"),
            # The guest writes nothing after the start.
            "read": self.callback("int32_t(void *, sterna_dirty_pages *, sterna_failure *)", lambda *_: 0),
        }
        call(lib.sterna_vm_use_dirty_log, self.vm, ffi.new("sterna_dirty_log *", log))

    def callback(self, kind, function):
        self.keep.append(ffi.callback(kind, function))
        return self.keep[-1]

    def text(self, text):
        self.keep.append(ffi.new("char[]", text.encode()))
        return self.keep[-1]

    def run(self, on):
        self.runs = on
        return 0

    def save(self, _user, state, _failure):
        lib.sterna_state_write(state, self.device.to_bytes(4, "little"), 4)
        return 0

    def load(self, _user, _version, body, length, failure):
        if length != 4:
            lib.sterna_failure_set(failure, b"a number has four bytes")
            return -1
        self.device = int.from_bytes(ffi.buffer(body, length)[:], "little")
        return 0


source, target = Machine(), Machine()
for page in range(PAGES):
    source.memory[page * 4096 : page * 4096 + 8] = (page * 3 + 1).to_bytes(8, "little")
source.device, source.runs = 4711, True

parameters = ffi.new("sterna_parameters **")
call(lib.sterna_parameters_new, parameters)
call(lib.sterna_parameters_set_capability, parameters[0], b"multifd", True)
call(lib.sterna_parameters_set, parameters[0], b"multifd-channels", b"2")
try:
    call(lib.sterna_parameters_set, parameters[0], b"multifd-channels", b"many")
    sys.exit("a word was accepted as a number")
except SternaError as error:
    assert error.args[0] == lib.STERNA_ERROR_SETTINGS, error

incoming, migration = ffi.new("sterna_incoming **"), ffi.new("sterna_migration **")
call(lib.sterna_incoming_listen, target.vm, b"tcp:127.0.0.1:0", parameters[0], ffi.NULL, incoming)
address = taken(lib.sterna_incoming_address(incoming[0])).encode()
call(lib.sterna_migration_start, source.vm, address, parameters[0], ffi.NULL, migration)
call(lib.sterna_migration_wait, migration[0], -1)
call(lib.sterna_incoming_wait, incoming[0], -1, ffi.NULL)

statistics = json.loads(taken(lib.sterna_migration_statistics(migration[0])))
assert statistics["status"] == "completed" and statistics["channels"] == 2, statistics
assert target.runs and not source.runs
for page in range(PAGES):
    assert target.memory[page * 4096 : page * 4096 + 8] == (page * 3 + 1).to_bytes(8, "little"), page

lib.sterna_migration_free(migration[0])
lib.sterna_incoming_free(incoming[0])
lib.sterna_parameters_free(parameters[0])
print(f"arrived: device {target.device}, {PAGES} pages")
