//! Devices of a guest in processes of their own: virtiofsd, and qemu-storage-daemon with a disk.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sterna_vmm::{DeviceKind, VhostUserOptions};

use super::guest::share::TAG;
use super::said;
use crate::scenarios::{Failure, ensure};

/// The directory that guests see.
pub(super) const SHARED: &str = "/tmp/shared";
const PATIENCE: Duration = Duration::from_secs(60);

/// A process that listens; ended when dropped.
pub(super) struct BackEnd {
    child: Child,
    directory: tempfile::TempDir,
    kind: DeviceKind,
}

impl BackEnd {
    /// Both devices, of which the disk is that file.
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
            // Both sides' processes have it open while the guest moves.
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

    fn start(kind: DeviceKind, command: impl FnOnce(&Path) -> Command) -> Result<Self, Failure> {
        let directory = tempfile::tempdir().map_err(said)?;
        let socket = directory.path().join("socket");
        let log = std::fs::File::create(directory.path().join("log")).map_err(said)?;
        let mut command = command(&socket);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn();
        let child = child.map_err(|error| format!("{command:?}: {error}"))?;
        let mut started = Self { child, directory, kind };
        let begin = Instant::now();
        while !socket.exists() {
            let has_ended = started.child.try_wait().map_err(said)?.is_some();
            ensure(!has_ended && begin.elapsed() < PATIENCE, || {
                let log = std::fs::read_to_string(started.directory.path().join("log")).unwrap_or_default();
                format!("{command:?} does not listen: {log}")
            })?;
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(started)
    }

    /// For the machine whose device `index` of this sort it is.
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
        // An error means that it has ended by itself, as virtiofsd does with its connection.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
