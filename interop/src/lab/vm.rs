//! A VM of the lab as a process of this host.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::rdma::sandboxed::RECORD;
use super::rdma::two::SIDE;
use super::{Kind, PROGRAM_VARIABLE, Prepared, Selection};
use crate::{Failure, Root};

/// Time limit until QEMU has made its socket.
const SOCKET_LIMIT: Duration = Duration::from_secs(30);

/// A VM of the lab, killed when dropped.
pub(super) struct Vm {
    process: Child,
    lines: Receiver<String>,
}

impl Vm {
    /// Boots a VM. With two VMs, `wire` is the socket to the other one and this VM's number, 0 or 1. The
    /// first VM makes the socket.
    pub(super) fn start(
        prepared: &Prepared,
        selection: &Selection,
        wire: Option<(&Path, usize)>,
    ) -> Result<Self, Failure> {
        let Prepared { kind, kernel, initramfs, exe, shares, disk } = prepared;
        let (variable, name, exe) = (Kind::VARIABLE, kind.name(), exe.display());
        let (words, side) = (selection.for_kernel(), wire.map_or(0, |(_, side)| side));
        let append = format!(
            "console=ttyS0 quiet panic=-1 {variable}={name} {PROGRAM_VARIABLE}={exe} {SIDE}={side} {words}"
        );
        // The maintainer of the table of system calls records them.
        let record =
            if std::env::var_os(RECORD).is_some() { format!("{RECORD}=/tmp/calls") } else { String::new() };
        let append = format!("{append} {record}");
        let mut command = emulator(*kind)?;
        command.args(["-accel", "tcg", "-cpu", "max,+svm,+npt", "-smp", "1"]);
        command
            .args(["-m", &kind.memory_mib(selection.is_bench).to_string(), "-append", &append])
            .arg("-kernel")
            .arg(kernel);
        command.arg("-initrd").arg(initramfs).args(["-no-reboot", "-nodefaults", "-display", "none"]);
        for (tag, directory) in shares {
            let directory = directory.display();
            command.args([
                "-fsdev",
                &format!("local,id={tag},path={directory},security_model=none,readonly=on,multidevs=remap"),
                "-device",
                &format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}"),
            ]);
        }
        if let Some(disk) = disk {
            let disk = disk.display();
            command.args(["-drive", &format!("file={disk},format=raw,if=virtio,snapshot=on")]);
        }
        if let Some((socket, side)) = wire {
            let (server, path) = (if side == 0 { "on" } else { "off" }, socket.display());
            command.args([
                "-netdev",
                &format!("stream,id=wire,server={server},addr.type=unix,addr.path={path}"),
                "-device",
                &format!("virtio-net-pci,netdev=wire,mac=02:00:00:00:01:0{side}"),
            ]);
        }
        let vm = Self::spawned(command)?;
        if let Some((socket, 0)) = wire {
            let until = Instant::now() + SOCKET_LIMIT;
            while !crate::is_listening(socket) {
                if Instant::now() > until {
                    return Err("qemu-system-x86_64 makes no socket for the wire".into());
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        Ok(vm)
    }

    fn spawned(mut command: Command) -> Result<Self, Failure> {
        let mut process = command
            .args(["-serial", "stdio"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("qemu-system-x86_64: {error}"))?;
        let output = BufReader::new(process.stdout.take().ok_or("no output of the VM")?);
        let (sender, lines) = channel();
        // The thread ends with the VM.
        std::thread::spawn(move || {
            for line in output.split(b'\n').map_while(Result::ok) {
                if sender.send(String::from_utf8_lossy(&line).trim().to_owned()).is_err() {
                    return;
                }
            }
        });
        Ok(Self { process, lines })
    }

    /// The next line of the VM's output.
    ///
    /// # Errors
    /// If the VM ends, or prints nothing within `limit`.
    pub(super) fn line(&self, limit: Duration) -> Result<String, RecvTimeoutError> {
        self.lines.recv_timeout(limit)
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        // The VM may have powered off by itself, or may hang. An error means that it has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The host's QEMU. With Linux guests, Debian 12's QEMU hangs about once in 30 moves: its only virtual CPU is
/// halted, and its thread spins. The newest QEMU does not.
fn emulator(kind: Kind) -> Result<Command, Failure> {
    match kind {
        Kind::Linux => Ok(Root::qemu().ok_or("there is no root `qemu`")?.qemu_system()),
        Kind::Kvm | Kind::Rdma | Kind::RdmaPair => Ok(Command::new("qemu-system-x86_64")),
    }
}
