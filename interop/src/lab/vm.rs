//! A VM of the lab as a process of this host.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::rdma::two::SIDE;
use super::{Kind, PROGRAM_VARIABLE, Prepared, Selection};
use crate::{Failure, Root};

/// How long QEMU may take until its socket is there.
const SOCKET_LIMIT: Duration = Duration::from_secs(30);

/// It; ended when dropped.
pub(super) struct Vm {
    process: Child,
    lines: Receiver<String>,
}

impl Vm {
    /// Boots it. `wire`: a socket to the other VM and this one's number, 0 or 1, if there are two. The first makes the socket.
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
        // It ends with the VM.
        std::thread::spawn(move || {
            for line in output.split(b'\n').map_while(Result::ok) {
                if sender.send(String::from_utf8_lossy(&line).trim().to_owned()).is_err() {
                    return;
                }
            }
        });
        Ok(Self { process, lines })
    }

    /// What it prints next.
    ///
    /// # Errors
    /// It ends, or is silent for so long.
    pub(super) fn line(&self, limit: Duration) -> Result<String, RecvTimeoutError> {
        self.lines.recv_timeout(limit)
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        // It powers off by itself, or hangs: either way it is over. An error means that it has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The host's QEMU. Under Linux guests Debian 12's stands still about once in 30 moves: its one virtual CPU is halted, and its
/// thread spins. The newest one does not.
fn emulator(kind: Kind) -> Result<Command, Failure> {
    match kind {
        Kind::Linux => Ok(Root::qemu().ok_or("there is no root `qemu`")?.qemu_system()),
        Kind::Kvm | Kind::Rdma | Kind::RdmaPair => Ok(Command::new("qemu-system-x86_64")),
    }
}
