//! Where a peer is, in QEMU's spelling.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::TransportError;

/// An address, as QEMU writes it: `tcp:HOST:PORT`, `unix:PATH`, `fd:NAME-OR-NUMBER`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// A host name or number and a port. An empty host means every address when listening and this
    /// machine when connecting; port 0 lets the kernel choose when listening.
    Tcp {
        /// Host name or number; IPv6 numbers without brackets.
        host: String,
        /// The port.
        port: u16,
    },
    /// A Unix socket's path.
    Unix(PathBuf),
    /// A descriptor that was inherited, by number, or that was handed over before under a name.
    Fd(String),
}

impl FromStr for Address {
    type Err = TransportError;

    fn from_str(text: &str) -> Result<Self, TransportError> {
        let refuse = |rule| Err(TransportError::Address { text: text.to_owned(), rule });
        let Some((kind, rest)) = text.split_once(':') else {
            return refuse("write tcp:HOST:PORT, unix:PATH or fd:NUMBER");
        };
        match kind {
            "tcp" => tcp(rest).or_else(refuse),
            "unix" if rest.is_empty() => refuse("a path must follow unix:"),
            // sockaddr_un has room for 107 bytes and the end.
            "unix" if rest.len() > 107 => refuse("the path of a Unix socket has at most 107 bytes"),
            "unix" => Ok(Address::Unix(rest.into())),
            "fd" if rest.is_empty() => refuse("a number or name must follow fd:"),
            "fd" => Ok(Address::Fd(rest.to_owned())),
            "exec" | "rdma" | "vsock" | "file" => refuse("this kind of address is not known here"),
            _ => refuse("it must begin with tcp:, unix: or fd:"),
        }
    }
}

fn tcp(rest: &str) -> Result<Address, &'static str> {
    let (host, port) = match rest.strip_prefix('[') {
        Some(inner) => inner.split_once("]:").ok_or("an IPv6 number is written tcp:[NUMBER]:PORT")?,
        None => rest.rsplit_once(':').ok_or("a port must follow: tcp:HOST:PORT")?,
    };
    if rest.contains(',') {
        return Err("options behind the port (such as ,ipv4=on) are not supported");
    }
    if !rest.starts_with('[') && host.contains(':') {
        return Err("an IPv6 number is written in brackets: tcp:[NUMBER]:PORT");
    }
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    match port.parse() {
        Ok(port) if digits => Ok(Address::Tcp { host: host.to_owned(), port }),
        _ => Err("the port must be a number from 0 to 65535"),
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Address::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Fd(name) => write!(f, "fd:{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_every_spelling_comes_back() {
        for text in [
            "tcp:localhost:4444",
            "tcp:127.0.0.1:0",
            "tcp::65535",
            "tcp:[::1]:4444",
            "unix:/tmp/a,b:c",
            "fd:12",
            "fd:mig",
        ] {
            let address: Address = text.parse().expect(text);
            assert_eq!(address.to_string(), text);
        }
    }

    #[test]
    fn address_ipv6_loses_its_brackets_inside() {
        let address: Address = "tcp:[fe80::1%eth0]:7".parse().unwrap();
        assert_eq!(address, Address::Tcp { host: "fe80::1%eth0".into(), port: 7 });
    }

    #[test]
    fn address_bad_spelling_is_refused_with_a_reason() {
        for (text, word) in [
            ("", "write tcp:"),
            ("localhost", "write tcp:"),
            ("localhost:4444", "begin with"),
            ("tcp:localhost", "port"),
            ("tcp:localhost:", "number"),
            ("tcp:localhost:+1", "number"),
            ("tcp:localhost:65536", "number"),
            ("tcp:localhost:1,ipv4=on", "options"),
            ("tcp:[::1]:1,ipv6=on", "options"),
            ("tcp:::1:4444", "brackets"),
            ("tcp:[::1]4444", "tcp:[NUMBER]"),
            ("unix:", "path"),
            ("fd:", "number or name"),
            ("exec:cat", "not known"),
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
        let long = format!("unix:/{}", "x".repeat(107));
        assert!(long.parse::<Address>().is_err());
    }
}
