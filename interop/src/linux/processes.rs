//! A guest's devices in processes of their own: virtiofsd, qemu-storage-daemon with a disk, and passt with a
//! network.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sterna_vmm::{DeviceKind, VhostUserOptions};

use super::guest::network::{GUEST_ADDRESS, LAB_ADDRESS};
use super::guest::share::TAG;
use super::network::{BRIDGE, GUEST_MAC, up};
use super::said;
use crate::is_listening;
use crate::scenarios::{Failure, ensure};

/// The directory that guests see.
pub(super) const SHARED: &str = "/tmp/shared";
const PATIENCE: Duration = Duration::from_secs(60);

/// A process that listens, killed when dropped.
pub(super) struct BackEnd {
    child: Child,
    directory: tempfile::TempDir,
    kind: DeviceKind,
}

impl BackEnd {
    /// Starts the back ends for the disk in that file and for the directory.
    pub(super) fn start_all(disk: &Path) -> Result<Vec<Self>, Failure> {
        std::fs::create_dir_all(SHARED).map_err(said)?;
        let tag = Some(TAG.to_owned());
        let share = Self::start(DeviceKind::FileSystem { tag }, |socket| {
            let mut command = Command::new("/usr/libexec/virtiofsd");
            command.args([
                "--shared-dir",
                SHARED,
                "--sandbox",
                "none",
                "--seccomp",
                "none",
                "--rlimit-nofile",
                "0",
            ]);
            command.args(["--inode-file-handles=never", "--migration-mode", "find-paths", "--socket-path"]);
            command.arg(socket);
            command
        })?;
        let disk = Self::start(DeviceKind::Block, |socket| {
            // Locking is off, because the processes of both sides have the file open during a move.
            let file = format!("driver=file,node-name=d,locking=off,filename={}", disk.display());
            let export = format!(
                "type=vhost-user-blk,id=e,node-name=d,writable=on,addr.type=unix,addr.path={}",
                socket.display()
            );
            let mut command = Command::new("qemu-storage-daemon");
            command.args(["--blockdev", &file, "--export", &export]);
            command
        })?;
        Ok(vec![disk, share])
    }

    /// Starts passt as the back end of a card. It needs no permission to make a tap.
    pub(super) fn start_network() -> Result<Self, Failure> {
        // passt reaches the lab's own addresses over the loopback.
        up("lo", None)?;
        let [guest, lab] = [GUEST_ADDRESS, LAB_ADDRESS].map(|address| Ipv4Addr::from(address).to_string());
        Self::start(DeviceKind::Network { mac: Some(GUEST_MAC) }, |socket| {
            let mut command = Command::new("passt");
            command.args(["--vhost-user", "--foreground", "--chroot-fallback", "--ipv4-only", "--no-map-gw"]);
            command.args(["--address", &guest, "--netmask=24", "--gateway", &lab, "--mtu=1500"]);
            command.args(["--interface", BRIDGE, "--no-dhcp", "--tcp-ports=none"]);
            command.arg("--socket-path").arg(socket);
            command
        })
    }

    fn start(kind: DeviceKind, command: impl FnOnce(&Path) -> Command) -> Result<Self, Failure> {
        let directory = tempfile::tempdir().map_err(said)?;
        let socket = directory.path().join("socket");
        let mut command = command(&socket);
        let child = spawn(&mut command, directory.path())?;
        let mut started = Self { child, directory, kind };
        let begin = Instant::now();
        while !is_listening(&socket) {
            let has_ended = started.child.try_wait().map_err(said)?.is_some();
            ensure(!has_ended && begin.elapsed() < PATIENCE, || {
                let log = std::fs::read_to_string(started.directory.path().join("log")).unwrap_or_default();
                format!("{command:?} does not listen: {log}")
            })?;
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(started)
    }

    /// Options of the machine for the device, number `index` of its kind.
    pub(super) fn options(&self, index: usize) -> VhostUserOptions {
        VhostUserOptions {
            queues: self.kind.queues(1),
            kind: Some(self.kind.clone()),
            answer_limit: PATIENCE,
            ..VhostUserOptions::new(format!("vhost-user/{index}"), self.directory.path().join("socket"))
        }
    }
}

impl Drop for BackEnd {
    fn drop(&mut self) {
        // An error means that the process has ended by itself, as virtiofsd does when its connection closes.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts the process, with its output in a log in that directory.
fn spawn(command: &mut Command, directory: &Path) -> Result<Child, Failure> {
    let log = std::fs::File::options().create(true).append(true).open(directory.join("log")).map_err(said)?;
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn();
    child.map_err(|error| format!("{command:?}: {error}"))
}
