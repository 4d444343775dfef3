//! Monitor commands for a domain: over the daemon's socket, else by virsh.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use serde_json::{Value, json};
use sterna_transport::CancelFlag;

use crate::address::DomainAddress;
use crate::connection::Connection;
use crate::error::LibvirtError;
use crate::packet::{Domain, MonitorEvent};
use crate::socket;
use crate::virsh::Virsh;

/// How long the daemon may take for a call. A monitor command waits 30 s for another job of the domain, and QEMU's longest
/// commands flush disks.
const CALL_LIMIT: Duration = Duration::from_secs(70);

/// A running domain, and the way to its monitor.
pub struct Access {
    address: DomainAddress,
    way: Way,
    /// Ends the waits of the connection.
    cancel: CancelFlag,
}

enum Way {
    Socket(Connection, Domain),
    Virsh(Virsh),
}

impl Access {
    /// Connects to the daemon of `address` and finds the domain. Tries the sockets of the daemon on this host, and then the
    /// program `virsh`.
    ///
    /// # Errors
    /// [`LibvirtError::Unreachable`] if neither works, [`LibvirtError::NotRunning`], and every refusal of libvirt.
    pub fn open(address: &DomainAddress, cancel: &CancelFlag) -> Result<Self, LibvirtError> {
        Self::open_with(address, "virsh", cancel)
    }

    /// Does the same as [`open`](Self::open), with another program in place of `virsh`.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub fn open_with(
        address: &DomainAddress,
        virsh: &str,
        cancel: &CancelFlag,
    ) -> Result<Self, LibvirtError> {
        let (uri, cancel) = (address.uri(), cancel.child());
        let (candidates, mut tried) = (socket::candidates(&uri), Vec::new());
        let is_local = !candidates.is_empty();
        for path in candidates {
            match Connection::open(&path, &socket::local(&uri), CALL_LIMIT, &cancel) {
                Ok(mut connection) => {
                    let domain = connection.lookup(address.name())?;
                    if domain.id < 0 {
                        return Err(LibvirtError::NotRunning { name: domain.name });
                    }
                    return Ok(Self {
                        address: address.clone(),
                        way: Way::Socket(connection, domain),
                        cancel,
                    });
                }
                // virsh can authenticate, and finds daemons that a socket unit or a proxy starts elsewhere.
                Err(error @ (LibvirtError::Io { .. } | LibvirtError::Authentication { .. })) => {
                    let error = match error {
                        LibvirtError::Io { error, .. } => error.to_string(),
                        error => error.to_string(),
                    };
                    tried.push((path, error));
                }
                Err(error) => return Err(error),
            }
        }
        match Virsh::open(virsh, address, is_local) {
            Ok(opened) => Ok(Self { address: address.clone(), way: Way::Virsh(opened?), cancel }),
            Err(error) => Err(LibvirtError::Unreachable { uri, tried, virsh: error }),
        }
    }

    /// The domain's address.
    pub fn address(&self) -> &DomainAddress {
        &self.address
    }

    /// The flag that ends every wait of this connection.
    pub(crate) fn cancel(&self) -> &CancelFlag {
        &self.cancel
    }

    /// Whether QEMU can get descriptors: its host is this one.
    pub fn passes_files(&self) -> bool {
        match &self.way {
            Way::Socket(..) => true,
            Way::Virsh(virsh) => virsh.passes_files(),
        }
    }

    /// The domain's XML for images.
    ///
    /// # Errors
    /// A refusal of libvirt, or a broken connection.
    pub fn xml(&mut self) -> Result<String, LibvirtError> {
        match &mut self.way {
            Way::Socket(connection, domain) => connection.xml(domain),
            Way::Virsh(virsh) => virsh.xml(),
        }
    }

    /// Executes `command`, JSON without an `id`, and returns QEMU's whole answer: an object with `return` or `error`.
    ///
    /// # Errors
    /// A refusal of libvirt, a broken connection, or an answer that is not JSON.
    pub fn answer(&mut self, command: &Value, files: &[BorrowedFd<'_>]) -> Result<Value, LibvirtError> {
        let text = command.to_string();
        let answer = match &mut self.way {
            Way::Socket(connection, domain) => connection.command(domain, &text, files)?,
            Way::Virsh(virsh) => virsh.monitor_command(&text, files.first().copied())?,
        };
        match serde_json::from_str(&answer) {
            Ok(answer @ Value::Object(_)) => Ok(answer),
            _ => Err(self.wrong(command["execute"].as_str().unwrap_or_default(), answer)),
        }
    }

    /// Executes the QMP command `name` and returns its result.
    ///
    /// # Errors
    /// Those of [`answer`](Self::answer), and [`LibvirtError::Answer`] with QEMU's error.
    pub fn execute(
        &mut self,
        name: &str,
        arguments: Value,
        files: &[BorrowedFd<'_>],
    ) -> Result<Value, LibvirtError> {
        let mut command = json!({ "execute": name });
        if !arguments.is_null() {
            command["arguments"] = arguments;
        }
        let mut answer = self.answer(&command, files)?;
        match answer.get_mut("return") {
            Some(result) => Ok(result.take()),
            None => Err(self.wrong(name, answer["error"]["desc"].as_str().unwrap_or_default().to_owned())),
        }
    }

    /// The daemon's connection, if there is one. virsh sends no events.
    pub(crate) fn connection(&mut self) -> Option<&mut Connection> {
        match &mut self.way {
            Way::Socket(connection, _) => Some(connection),
            Way::Virsh(_) => None,
        }
    }

    /// Makes the daemon send events, if there is a connection.
    pub(crate) fn register_events(&mut self) -> Result<(), LibvirtError> {
        match &mut self.way {
            Way::Socket(connection, domain) => connection.register_events(domain).map(drop),
            Way::Virsh(_) => Ok(()),
        }
    }

    /// An event that has arrived.
    pub(crate) fn event(&mut self) -> Result<Option<MonitorEvent>, LibvirtError> {
        self.connection().map_or(Ok(None), |connection| connection.next_event(Duration::ZERO))
    }

    fn wrong(&self, command: &str, answer: String) -> LibvirtError {
        LibvirtError::Answer { address: self.address.to_string(), command: command.to_owned(), answer }
    }
}
