//! Calls by the program `virsh`, for daemons whose socket this program cannot use.

use std::io;
use std::os::fd::BorrowedFd;
use std::process::{Command, Output, Stdio};

use crate::address::DomainAddress;
use crate::error::LibvirtError;

/// The program `virsh` for one domain.
#[derive(Debug, Clone)]
pub struct Virsh {
    program: String,
    address: DomainAddress,
    /// Whether the daemon runs on this host, so that QEMU can get descriptors.
    is_local: bool,
}

impl Virsh {
    /// Runs `program` for `address`. Checks that the domain runs.
    ///
    /// # Errors
    /// The outer one: the program cannot be run. The inner one: it failed, or the domain does not run.
    pub(crate) fn open(
        program: &str,
        address: &DomainAddress,
        is_local: bool,
    ) -> io::Result<Result<Self, LibvirtError>> {
        let virsh = Self { program: program.to_owned(), address: address.clone(), is_local };
        let output = virsh.command(&["domstate", "--", address.name()], Stdio::null()).output()?;
        Ok(virsh.text("domstate", output).and_then(|state| match state.trim() {
            "shut off" => Err(LibvirtError::NotRunning { name: address.name().to_owned() }),
            _ => Ok(virsh),
        }))
    }

    /// Whether descriptors can be passed to the domain's QEMU.
    pub fn passes_files(&self) -> bool {
        self.is_local
    }

    /// Executes a QMP command, as [`Connection::command`](crate::Connection::command). The descriptor is the standard input
    /// of virsh.
    ///
    /// # Errors
    /// [`LibvirtError::Virsh`] with virsh's message.
    pub fn monitor_command(
        &self,
        command: &str,
        file: Option<BorrowedFd<'_>>,
    ) -> Result<String, LibvirtError> {
        let what = "qemu-monitor-command";
        let failed = |error| LibvirtError::Io { call: "virsh qemu-monitor-command", error };
        let (input, more): (Stdio, &[&str]) = match file {
            None => (Stdio::null(), &[]),
            Some(_) if !self.is_local => {
                return Err(LibvirtError::OtherHost { address: self.address.to_string() });
            }
            Some(file) => (file.try_clone_to_owned().map_err(failed)?.into(), &["--pass-fds", "0"]),
        };
        let arguments = [&[what][..], more, &["--", self.address.name(), command]].concat();
        let output = self.command(&arguments, input).output().map_err(failed)?;
        self.text(what, output)
    }

    /// The domain's XML, as [`Connection::xml`](crate::Connection::xml).
    ///
    /// # Errors
    /// [`LibvirtError::Virsh`] with virsh's message.
    pub fn xml(&self) -> Result<String, LibvirtError> {
        let failed = |error| LibvirtError::Io { call: "virsh dumpxml", error };
        let arguments = ["dumpxml", "--migratable", "--inactive", "--", self.address.name()];
        let output = self.command(&arguments, Stdio::null()).output().map_err(failed)?;
        self.text("dumpxml", output)
    }

    fn command(&self, arguments: &[&str], input: Stdio) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["--quiet", "--connect", &self.address.uri()]).args(arguments).stdin(input);
        // The texts of an error must not depend on the operator's language.
        command.env("LC_ALL", "C.UTF-8");
        command
    }

    fn text(&self, what: &str, output: Output) -> Result<String, LibvirtError> {
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let message = match said.trim().trim_start_matches("error: ") {
            "" => output.status.to_string(),
            said => said.to_owned(),
        };
        let command = self.address.virsh(&format!("{what} {}", self.address.quoted_name()));
        Err(LibvirtError::Virsh { command, message })
    }
}
