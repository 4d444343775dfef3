"""Drives a monitor with PyPI's qemu.qmp, as a program written for QEMU would. Argument: the socket's path."""

import asyncio
import sys

from qemu.qmp import ExecuteError, QMPClient


async def main(path):
    qmp = QMPClient("sterna-test")
    await qmp.connect(path)
    assert qmp.greeting is not None
    assert qmp.greeting.QMP.version["package"].startswith("Sterna")

    assert (await qmp.execute("query-status"))["status"] == "running"
    assert (await qmp.execute("query-name")) == {"name": "tern"}
    assert (await qmp.execute("query-migrate")) == {}

    with qmp.listener(("STOP", "RESUME")) as listener:
        await qmp.execute("stop")
        assert (await asyncio.wait_for(listener.get(), 60))["event"] == "STOP"
        assert not (await qmp.execute("query-status"))["running"]
        await qmp.execute("cont")
        assert (await asyncio.wait_for(listener.get(), 60))["event"] == "RESUME"

    capabilities = [{"capability": name, "state": True} for name in ("events", "multifd")]
    await qmp.execute("migrate-set-capabilities", {"capabilities": capabilities})
    await qmp.execute("migrate-set-parameters", {"multifd-channels": 4, "x-rdma-chunk-size": 4 << 20})
    parameters = await qmp.execute("query-migrate-parameters")
    assert parameters["multifd-channels"] == 4 and parameters["x-rdma-chunk-size"] == 4 << 20

    for command, arguments, klass in (
        ("migrate-set-parameters", {"multifd-channels": 0}, "GenericError"),
        ("migrate-set-parameters", {"x-rdma-chunk-size": 3 << 20}, "GenericError"),
        ("no-such-command", {}, "CommandNotFound"),
    ):
        try:
            await qmp.execute(command, arguments)
        except ExecuteError as error:
            assert error.error_class == klass, error.error_class
        else:
            raise AssertionError(f"{command} should have been refused")

    with qmp.listener("MIGRATION") as listener:
        await qmp.execute("migrate", {"uri": "tcp:127.0.0.1:1"})
        assert (await qmp.execute("query-migrate"))["status"] == "setup"
        await qmp.execute("migrate_cancel")
        seen = [(await asyncio.wait_for(listener.get(), 60))["data"]["status"] for _ in range(2)]
        assert seen == ["cancelling", "cancelled"], seen

    text = await qmp.execute("human-monitor-command", {"command-line": "info migrate_parameters"})
    assert "multifd-channels: 4" in text
    await qmp.disconnect()
    print("dialogue complete")


asyncio.run(main(sys.argv[1]))
