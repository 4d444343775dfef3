//! Where the monitor of a VM is: a socket, or libvirt.

use std::fmt;
use std::str::FromStr;

use sterna_libvirt::DomainAddress;
use sterna_qmp::Endpoint;

/// The address of a monitor: a socket of its own, or a domain of libvirt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MonitorAddress {
    /// A QMP socket: `unix:PATH`, a path, or `tcp:HOST:PORT`.
    Socket(Endpoint),
    /// A domain of libvirt: `libvirt:NAME` or `libvirt+URI:NAME`.
    Domain(DomainAddress),
}

impl MonitorAddress {
    /// The domain, if it is one of libvirt.
    pub fn domain(&self) -> Option<&DomainAddress> {
        match self {
            Self::Domain(domain) => Some(domain),
            Self::Socket(_) => None,
        }
    }
}

impl From<Endpoint> for MonitorAddress {
    fn from(endpoint: Endpoint) -> Self {
        Self::Socket(endpoint)
    }
}

impl FromStr for MonitorAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if DomainAddress::is_meant_by(text) {
            text.parse().map(Self::Domain)
        } else {
            text.parse().map(Self::Socket)
        }
    }
}

impl fmt::Display for MonitorAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(endpoint) => endpoint.fmt(f),
            Self::Domain(domain) => domain.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_of_a_domain_is_no_path() {
        let domain: MonitorAddress = "libvirt:web1".parse().unwrap();

        assert_eq!(domain.domain().map(DomainAddress::name), Some("web1"));
        assert_eq!("./libvirt:web1".parse::<MonitorAddress>().unwrap().domain(), None);
        // Commands that need a socket of their own do not take it for a file.
        assert!("libvirt:web1".parse::<Endpoint>().is_err());
    }
}
