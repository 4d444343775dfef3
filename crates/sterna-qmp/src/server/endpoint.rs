//! The address of a monitor.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// A monitor's address: `unix:PATH` (or a bare path) or `tcp:HOST:PORT` with a numeric host.
///
/// A bare path cannot begin with `libvirt:` or `libvirt+`, because these are addresses of libvirt's domains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// The path of a socket file.
    Unix(PathBuf),
    /// A TCP address with a numeric host.
    Tcp(SocketAddr),
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(address) = text.strip_prefix("tcp:") {
            let address = match address.strip_prefix("localhost:") {
                Some(port) => format!("127.0.0.1:{port}"),
                None => address.to_owned(),
            };
            return address.parse().map(Self::Tcp).map_err(|error| {
                format!("'{text}' is not a monitor address ({error}); write tcp:127.0.0.1:PORT")
            });
        }
        if ["libvirt:", "libvirt+"].iter().any(|head| text.starts_with(head)) {
            return Err(format!(
                "'{text}' is a domain of libvirt, and this needs a QMP socket; for a socket of that name, write unix:{text}"
            ));
        }
        let path = text.strip_prefix("unix:").unwrap_or(text);
        if path.is_empty() {
            return Err("a monitor's socket path may not be empty".into());
        }
        Ok(Self::Unix(path.into()))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}
