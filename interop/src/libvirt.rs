//! libvirt's daemon with its QEMU driver, in its own root, isolated from the host.
//!
//! It runs in private mount, process and network namespaces. The root is entered there. All files that the
//! daemon writes are in memory or in the test's directory, which has the same path on both sides. A shell is
//! the first process and reaps processes that daemons leave behind. It ends at the end of its standard input,
//! and all other processes end with it. Therefore no process remains even if the test is killed. Domains run
//! under TCG.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use sterna_image::Format;
use tempfile::TempDir;

use crate::qemu::PATIENCE;
use crate::ticks::{Tick, ticks};
use crate::{Failure, Root, boot_disk, skip};

/// What `virsh save --image-format` takes, in the order of their numbers in the header.
pub fn save_formats() -> Vec<&'static str> {
    Format::ALL.iter().filter(|format| format.is_libvirt()).map(|format| format.word()).collect()
}

/// Sets up the namespaces and runs the daemon. $1: the root; $2: the test's directory; $3: the host's name; $4: a directory that
/// daemons share. The daemon's `/run/libvirt` is `run` of the test's directory.
const START: &str = r#"
set -e
mount --make-rprivate /
hostname "$3"
mount --bind "$1" "$1"
for place in run var/lib/libvirt var/log var/cache tmp etc/libvirt; do
    mount -t tmpfs tmpfs "$1/$place"
done
mkdir -p "$1$2" "$1$4" "$1/run/libvirt" "$2/run"
mount --bind "$2" "$1$2"
mount --bind "$4" "$1$4"
mount --bind "$2/run" "$1/run/libvirt"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
mount -t sysfs sysfs "$1/sys"
cp "$2/libvirtd.conf" "$2/qemu.conf" "$1/etc/libvirt/"
chroot "$1" /usr/sbin/libvirtd --config /etc/libvirt/libvirtd.conf </dev/null &
cat >/dev/null
"#;
const NAMESPACES: [&str; 4] = ["--mount", "--pid", "--net", "--uts"];
const DAEMON: &str = "auth_unix_ro = \"none\"\nauth_unix_rw = \"none\"\nunix_sock_rw_perms = \"0700\"\n";
/// A daemon asks its client every second, and closes the connection after four seconds without an answer.
const IMPATIENT: &str = "keepalive_interval = 1\nkeepalive_count = 3\n";
/// Configuration of the driver. The namespaces isolate the daemon, so it needs no other user, control groups
/// or log daemon.
const DRIVER: &str = "user = \"root\"\ngroup = \"root\"\nsecurity_driver = \"none\"\ndynamic_ownership = 0\n\
                      remember_owner = 0\nnamespaces = [ ]\ncgroup_controllers = [ ]\nstdio_handler = \"file\"\n";

/// A running daemon, ended when dropped.
pub struct Libvirt {
    root: Root,
    process: Child,
    directory: TempDir,
    /// Where the disks and serial files of domains are: in the directory, or in one that two daemons share.
    shared: PathBuf,
}

/// What distinguishes a daemon from others.
struct Place<'a> {
    host: &'a str,
    /// Last digit of the host's UUID.
    digit: char,
    shared: Option<&'a Path>,
    is_impatient: bool,
}

impl Libvirt {
    /// Starts the daemon. If that is impossible here, reports `test` as skipped.
    ///
    /// # Errors
    /// If the root exists, but the daemon does not answer.
    pub fn start_for(test: &str) -> Result<Option<Self>, Failure> {
        let place = Place { host: "alone", digit: '1', shared: None, is_impatient: false };
        Self::root_for(test).map(|root| Self::start(root, &place)).transpose()
    }

    /// Starts two daemons on hosts of their own, whose domains have their disks and serial files in `shared`. Both close a control
    /// connection on which nothing arrives for four seconds. If that is impossible here, reports `test` as skipped.
    ///
    /// # Errors
    /// If the root exists, but a daemon does not answer.
    pub fn pair_for(test: &str, shared: &Path) -> Result<Option<[Self; 2]>, Failure> {
        let Some(root) = Self::root_for(test) else { return Ok(None) };
        let place = |host, digit| Place { host, digit, shared: Some(shared), is_impatient: true };
        let source = Self::start(root.clone(), &place("source", '2'))?;
        Ok(Some([source, Self::start(root, &place("destination", '3'))?]))
    }

    /// The root, if daemons can run here.
    fn root_for(test: &str) -> Option<Root> {
        let root = Root::libvirt_for(test)?;
        let probe = Command::new("unshare").args(NAMESPACES).args(["--fork", "true"]).output();
        match probe {
            Ok(output) if output.status.success() => return Some(root),
            Ok(output) => {
                skip(test, &format!("no namespaces: {}", String::from_utf8_lossy(&output.stderr).trim()))
            }
            Err(error) => skip(test, &format!("unshare: {error}")),
        }
        None
    }

    fn start(root: Root, at: &Place<'_>) -> Result<Self, Failure> {
        let directory = tempfile::Builder::new()
            .prefix("sterna-")
            .tempdir()
            .map_err(|error| format!("no temporary directory: {error}"))?;
        let place = |name: &str| directory.path().join(name);
        let put = |name: &str, text: &str| {
            std::fs::write(place(name), text).map_err(|error| format!("{}: {error}", place(name).display()))
        };
        let patience = if at.is_impatient { IMPATIENT } else { "" };
        let uuid = format!("host_uuid = \"8d5c0a5e-4f0b-4d9a-9a4f-2f1a5f1e0a1{}\"\n", at.digit);
        put("libvirtd.conf", &format!("{DAEMON}{uuid}{patience}"))?;
        put("qemu.conf", &format!("{DRIVER}{patience}"))?;
        let shared = at.shared.unwrap_or(directory.path()).to_owned();
        put("start", START)?;
        let log = std::fs::File::create(place("log")).map_err(|error| format!("log: {error}"))?;
        let process = Command::new("unshare")
            .args(NAMESPACES)
            .args(["--fork", "--kill-child", "sh"])
            .arg(place("start"))
            .arg(root.path())
            .arg(directory.path())
            .arg(at.host)
            .arg(&shared)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .map_err(|error| format!("unshare: {error}"))?;
        let mut libvirt = Self { root, process, directory, shared };
        libvirt.wait_until_it_answers()?;
        Ok(libvirt)
    }

    fn wait_until_it_answers(&mut self) -> Result<(), Failure> {
        let begin = Instant::now();
        loop {
            if self.directory().join("run/libvirt-sock").exists() && self.virsh(&["version"]).is_ok() {
                return Ok(());
            }
            if let Ok(Some(status)) = self.process.try_wait() {
                return Err(format!("libvirtd ended with {status}: {}", self.log().trim()));
            }
            if begin.elapsed() > PATIENCE {
                return Err(format!("libvirtd does not answer: {}", self.log().trim()));
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }

    /// The test's directory, which has the same path for the daemon.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The daemon's socket.
    pub fn socket(&self) -> PathBuf {
        self.directory().join("run/libvirt-sock")
    }

    /// A program that takes virsh's arguments, and uses this daemon in place of that of `--quiet --connect URI`.
    ///
    /// # Errors
    /// The program cannot be written.
    pub fn virsh_program(&self) -> Result<String, Failure> {
        let (path, virsh) = (self.directory().join("virsh"), self.root.command("virsh"));
        let words = std::iter::once(virsh.get_program()).chain(virsh.get_args());
        let words: Vec<String> = words.map(|word| format!("'{}'", word.display())).collect();
        let uri = format!("qemu:///system?socket={}", self.socket().display());
        let text = format!("#!/bin/sh\nshift 3\nexec {} --quiet --connect '{uri}' \"$@\"\n", words.join(" "));
        // Another process writes it: a program that a thread's new process still has open for writing cannot be run.
        let mut writer = Command::new("sh");
        writer.args(["-c", "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\""]).arg(&path).arg(text);
        match writer.status() {
            Ok(status) if status.success() => Ok(path.display().to_string()),
            other => Err(format!("{}: {other:?}", path.display())),
        }
    }

    /// virsh with these arguments, ready to be run.
    pub fn virsh_command(&self, arguments: &[&str]) -> Command {
        let mut command = self.root.command("virsh");
        command.arg("--connect").arg(format!("qemu:///system?socket={}", self.socket().display()));
        command.args(arguments).stdin(Stdio::null());
        command
    }

    /// Runs virsh and returns its output.
    ///
    /// # Errors
    /// The message of virsh.
    pub fn virsh(&self, arguments: &[&str]) -> Result<String, Failure> {
        let output = self.virsh_command(arguments).output().map_err(|error| format!("virsh: {error}"))?;
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        } else {
            let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            Err(format!("virsh {}: {why}", arguments.join(" ")))
        }
    }

    /// Creates a transient domain that runs the boot guest ([`crate::Guest::Boot`]). `machine` is `pc` or
    /// `q35`. Its QEMU has a [second monitor](Self::operator_socket) in addition to libvirt's.
    ///
    /// # Errors
    /// The refusal of libvirt.
    pub fn create(&self, name: &str, machine: &str, memory_mib: u64) -> Result<(), Failure> {
        self.create_with_disk(name, machine, memory_mib, None)
    }

    /// Does the same as [`create`](Self::create), with a second disk: a raw file that each host has for itself.
    ///
    /// # Errors
    /// The refusal of libvirt.
    pub fn create_with_disk(
        &self,
        name: &str,
        machine: &str,
        memory_mib: u64,
        second: Option<&Path>,
    ) -> Result<(), Failure> {
        let disk = self.shared.join(format!("{name}.img"));
        boot_disk(&disk, memory_mib)?;
        let second = second.map_or_else(String::new, |file| {
            format!(
                "<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{}'/>\
                 <target dev='vdb' bus='virtio'/></disk>",
                file.display()
            )
        });
        let (target, bus) = if machine == "pc" { ("hda", "ide") } else { ("sda", "sata") };
        let xml = format!(
            "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'><name>{name}</name>\
             <memory unit='MiB'>{memory_mib}</memory><vcpu>1</vcpu>\
             <os><type arch='x86_64' machine='{machine}'>hvm</type><boot dev='hd'/></os>\
             <features><acpi/></features><devices><emulator>/usr/bin/qemu-system-x86_64</emulator>\
             <disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{}'/>\
             <target dev='{target}' bus='{bus}'/></disk>{second}\
             <serial type='file'><source path='{}' append='on'/></serial>\
             <memballoon model='none'/></devices>\
             <qemu:commandline><qemu:arg value='-qmp'/>\
             <qemu:arg value='unix:{},server=on,wait=off'/></qemu:commandline></domain>",
            disk.display(),
            self.serial_file(name).display(),
            self.operator_socket(name).display(),
        );
        let file = self.directory().join(format!("{name}.xml"));
        std::fs::write(&file, xml).map_err(|error| format!("{}: {error}", file.display()))?;
        self.virsh(&["create", &file.to_string_lossy()]).map(drop)
    }

    /// Socket of a second monitor of the domain's QEMU, without a client: for `sterna save`.
    pub fn operator_socket(&self, name: &str) -> PathBuf {
        self.shared.join(format!("{name}.operator"))
    }

    /// The complete serial output of the domain, in every machine in which it ran.
    pub fn serial(&self, name: &str) -> String {
        String::from_utf8_lossy(&std::fs::read(self.serial_file(name)).unwrap_or_default()).into_owned()
    }

    /// Waits until the domain's guest has ticked `more` times from now.
    ///
    /// # Errors
    /// A tick was BAD, or no line arrived within [`PATIENCE`].
    pub fn wait_for_ticks(&self, name: &str, more: usize) -> Result<Tick, Failure> {
        let wanted = ticks(&self.serial(name)).len() + more;
        let begin = Instant::now();
        loop {
            let ticks = ticks(&self.serial(name));
            if let Some(bad) = ticks.iter().find(|tick| !tick.ok) {
                return Err(format!("the guest's memory changed: tick {} is BAD", bad.number));
            }
            if let Some(last) = ticks.last().filter(|_| ticks.len() >= wanted) {
                return Ok(*last);
            }
            if begin.elapsed() > PATIENCE {
                return Err(format!(
                    "the guest ticked {} times, not {wanted}: {}",
                    ticks.len(),
                    self.log().trim()
                ));
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// Output of the daemon.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory().join("log")).unwrap_or_default()
    }

    /// File of the serial output.
    pub fn serial_file(&self, name: &str) -> PathBuf {
        self.shared.join(format!("{name}.serial"))
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        // The shell ends at the end of its input, and with it every process of the namespace.
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}
