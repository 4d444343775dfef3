//! systemd's interfaces for a service: sockets that it opened, and its news of the service's state.
//!
//! Both are environment variables and a datagram (`sd_listen_fds(3)`, `sd_notify(3)`), without a library.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use sterna_transport::Address;

use crate::exit::Stop;

/// The first descriptor that systemd passes.
const FIRST: u32 = 3;
const MOST: u32 = 1024;

/// Listening sockets that systemd opened for this process, with their names (`FileDescriptorName=`).
#[derive(Debug, Default)]
pub struct Listeners(Vec<(String, Address)>);

impl Listeners {
    /// The sockets that the environment names. Each can be taken once.
    ///
    /// # Errors
    /// `LISTEN_FDS` names descriptors that this process does not have, or that do not listen.
    pub fn from_environment() -> Result<Self, Stop> {
        let text = |name: &str| std::env::var(name).unwrap_or_default();
        if text("LISTEN_PID") != std::process::id().to_string() {
            return Ok(Self::default());
        }
        let wrong = || Stop::usage(format!("LISTEN_FDS={:?} is not a number of sockets", text("LISTEN_FDS")));
        let count: u32 = text("LISTEN_FDS").parse().ok().filter(|count| *count <= MOST).ok_or_else(wrong)?;
        let names = text("LISTEN_FDNAMES");
        let names: Vec<&str> = names.split(':').collect();
        let take = |index: u32| {
            let name = names.get(index as usize).copied().unwrap_or("unknown").to_owned();
            let address = sterna_vmm::claim_inherited(Address::Fd((FIRST + index).to_string()));
            let address =
                address.map_err(|error| Stop::failed(format!("socket {name:?} of systemd: {error}")))?;
            match address.is_descriptor() {
                true => Err(Stop::usage(format!(
                    "socket {name:?} of systemd does not listen: its unit needs Accept=no and ListenStream="
                ))),
                false => Ok((name, address)),
            }
        };
        (0..count).map(take).collect::<Result<_, _>>().map(Self)
    }

    /// Takes the socket that `text` names: `systemd:NAME`, or `systemd` if there is only one. `None`: `text` is another
    /// address.
    ///
    /// # Errors
    /// There is no such socket, or there are several.
    pub fn take(&mut self, text: &str) -> Option<Result<Address, Stop>> {
        let name = match text.strip_prefix("systemd") {
            Some("") => None,
            Some(rest) => Some(rest.strip_prefix(':')?),
            None => return None,
        };
        let found: Vec<usize> =
            (0..self.0.len()).filter(|at| name.is_none_or(|name| self.0[*at].0 == name)).collect();
        Some(match found[..] {
            [at] => Ok(self.0.remove(at).1),
            [] if self.0.is_empty() => Err(Stop::usage(format!(
                "{text}: systemd has passed no socket: start the .socket unit of this service, or write an address"
            ))),
            _ => {
                let names: Vec<&str> = self.0.iter().map(|(name, _)| name.as_str()).collect();
                Err(Stop::usage(format!(
                    "{text}: systemd has passed the sockets {}: write systemd:NAME with the FileDescriptorName= of one",
                    names.join(", ")
                )))
            }
        })
    }
}

/// Tells systemd about the service (`Type=notify`). Without `NOTIFY_SOCKET` it does nothing.
#[derive(Debug, Default)]
pub struct Notifier(Option<(UnixDatagram, SocketAddr)>);

impl Notifier {
    /// The notifier for the socket that the environment names.
    pub fn from_environment() -> Self {
        let path = std::env::var("NOTIFY_SOCKET").unwrap_or_default();
        let address = match path.strip_prefix('@') {
            Some(name) => SocketAddr::from_abstract_name(name),
            None if path.starts_with('/') => SocketAddr::from_pathname(&path),
            None => return Self(None),
        };
        Self(UnixDatagram::unbound().ok().zip(address.ok()))
    }

    /// The service is ready.
    pub fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={}", line(status)));
    }

    /// What the service does now, for `systemctl status`.
    pub fn status(&self, status: &str) {
        self.send(&format!("STATUS={}", line(status)));
    }

    /// The service begins to end.
    pub fn stopping(&self, status: &str) {
        self.send(&format!("STOPPING=1\nSTATUS={}", line(status)));
    }

    /// A lost message is no failure of the service.
    fn send(&self, text: &str) {
        if let Some((socket, address)) = &self.0 {
            let _ = socket.set_nonblocking(true);
            let _ = socket.send_to_addr(text.as_bytes(), address);
        }
    }
}

fn line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_is_taken_by_its_name_or_alone() {
        let mut none = Listeners::default();
        assert!(none.take("unix:/a").is_none() && none.take("systemdx").is_none());
        assert!(none.take("systemd").unwrap().unwrap_err().message.contains("no socket"));
        let of = |path: &str| Address::Unix(path.into());
        let mut two = Listeners(vec![("a".into(), of("/a")), ("b".into(), of("/b"))]);
        assert!(two.take("systemd").unwrap().unwrap_err().message.contains("a, b"));
        assert!(two.take("systemd:c").unwrap().is_err());
        assert_eq!(two.take("systemd:b").unwrap().unwrap(), of("/b"));
        assert_eq!(two.take("systemd").unwrap().unwrap(), of("/a"));
    }
}
