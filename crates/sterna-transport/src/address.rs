//! Addresses of a migration in QEMU's spelling, parsed and printed.
//!
//! A file is an address too: a guest is saved to it and restored from it. Channels cannot connect to a file; see
//! [`crate::PageFile`].

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;

use crate::error::TransportError;
use crate::handed::{self, HandedFd};
use crate::unix_path::LONGEST_UNIX_PATH;

/// A migration address as QEMU writes it.
///
/// The forms are `tcp:HOST:PORT`, `rdma:HOST:PORT`, `unix:PATH`, `fd:NAME-OR-NUMBER` and `file:PATH[,offset=N]`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Address {
    /// A host name or IP address, and a port. An empty host means every address for listening and this machine for
    /// connecting.
    Tcp {
        /// Host name or IP address; IPv6 without brackets.
        host: String,
        /// TCP port; 0 lets the kernel choose when listening.
        port: u16,
    },
    /// A host with an RDMA adapter, and a port of the connection manager (specs/rdma.md §1). [`crate::Channel`] and
    /// [`crate::Listener`] refuse it: the module `rdma` (feature `rdma`) connects.
    Rdma {
        /// Host name or IP address; IPv6 without brackets. Empty means every address when listening.
        host: String,
        /// Port of the connection manager; 0 lets the system choose when listening.
        port: u16,
    },
    /// Path of a Unix socket.
    Unix(PathBuf),
    /// A descriptor's number, or a name under which the program received it elsewhere (QMP `getfd`).
    ///
    /// A number is duplicated, and the original stays open and with its owner. The two share their flags: a connection
    /// is made blocking, a listener non-blocking.
    Fd(String),
    /// A descriptor that the address itself owns.
    Handed(HandedFd),
    /// A file that contains, or will contain, a guest's state (specs/mapped-ram.md §4.11).
    File {
        /// Path of the file.
        path: PathBuf,
        /// Start of the state in the file, in bytes: after a container's header, for example.
        offset: u64,
    },
}

impl Address {
    /// The address of a listening TCP or Unix socket that this process was given or made itself (systemd's socket
    /// activation, a jail).
    ///
    /// The listener accepts any number of channels. `fd` is closed with it; the file of a Unix socket stays.
    /// [`Listener::local_address`](crate::Listener::local_address) is the address to which a source connects.
    ///
    /// # Errors
    /// [`TransportError::Descriptor`] if `fd` is not a listening stream socket; `fd` is then closed.
    pub fn from_listener(fd: OwnedFd) -> Result<Address, TransportError> {
        HandedFd::listener(fd).map(Address::Handed)
    }

    /// The address of a connected TCP or Unix socket, for either side of a migration. It is one channel, so multifd,
    /// `postcopy-preempt` and a reconnect window are refused with it.
    ///
    /// `fd` is closed with the channel.
    ///
    /// # Errors
    /// [`TransportError::Descriptor`] if `fd` is not a connected stream socket; `fd` is then closed.
    pub fn from_connected(fd: OwnedFd) -> Result<Address, TransportError> {
        HandedFd::connected(fd).map(Address::Handed)
    }

    /// Whether the address is a descriptor that is a single channel, which cannot be connected again. A listening
    /// socket is not.
    pub fn is_descriptor(&self) -> bool {
        match self {
            Address::Fd(name) => !handed::is_listening(name),
            Address::Handed(fd) => !fd.is_listening(),
            _ => false,
        }
    }

    /// Whether the address is a pipe that was handed over. A guest can be saved into it.
    pub fn is_pipe(&self) -> bool {
        matches!(self, Address::Handed(fd) if fd.is_pipe())
    }

    /// Takes ownership of the inherited descriptor that this address names by its number (`fd:7`).
    ///
    /// Other addresses are returned unchanged. The call is meant for addresses on the program's command line,
    /// where the parent process handed the descriptor over. The descriptor is closed when its user ends.
    ///
    /// # Safety
    /// If the address names an open descriptor, no other code in this process may own or use it, now or later. It was
    /// inherited through exec, was not claimed before, and no other thread claims it meanwhile. A descriptor that is
    /// close-on-exec, such as all those that Rust's library opens, is refused. Those of a C library may not be
    /// close-on-exec.
    ///
    /// # Errors
    /// [`TransportError::Connect`]: the number names no inherited descriptor, or the descriptor was already claimed.
    pub unsafe fn claim_inherited(self) -> Result<Address, TransportError> {
        let Address::Fd(name) = &self else { return Ok(self) };
        // SAFETY: the caller guarantees the same conditions.
        match unsafe { HandedFd::inherited(name) } {
            Ok(fd) => Ok(Address::Handed(fd)),
            Err(source) => Err(TransportError::Connect { address: self.to_string(), source }),
        }
    }
}

impl FromStr for Address {
    type Err = TransportError;

    fn from_str(text: &str) -> Result<Self, TransportError> {
        let refuse = |rule| Err(TransportError::Address { text: text.to_owned(), rule });
        let Some((kind, rest)) = text.split_once(':') else {
            return refuse("write tcp:HOST:PORT, rdma:HOST:PORT, unix:PATH, fd:NUMBER or file:PATH");
        };
        if text.contains('\0') {
            return refuse("it must not contain NUL");
        }
        match kind {
            "tcp" => host_and_port(rest).map(|(host, port)| Address::Tcp { host, port }).or_else(refuse),
            "rdma" => host_and_port(rest).map(|(host, port)| Address::Rdma { host, port }).or_else(refuse),
            "unix" if rest.is_empty() => refuse("a path must follow unix:"),
            // The address may be sent to a QEMU, which cannot reach the socket by a shorter name.
            "unix" if rest.len() > LONGEST_UNIX_PATH => {
                refuse("the path of a Unix socket has at most 107 bytes: choose a shorter one")
            }
            "unix" => Ok(Address::Unix(rest.into())),
            "fd" if rest.is_empty() => refuse("a number or name must follow fd:"),
            "fd" => Ok(Address::Fd(rest.to_owned())),
            "file" => file(rest).or_else(refuse),
            "exec" | "vsock" => refuse("this kind of address is not supported"),
            _ => refuse("it must begin with tcp:, rdma:, unix:, fd: or file:"),
        }
    }
}

/// Parses `HOST:PORT`, with IPv6 addresses in brackets.
fn host_and_port(rest: &str) -> Result<(String, u16), &'static str> {
    let (host, port) = match rest.strip_prefix('[') {
        Some(inner) => inner.split_once("]:").ok_or("write an IPv6 number as [NUMBER]:PORT")?,
        None => rest.rsplit_once(':').ok_or("a port must follow: HOST:PORT")?,
    };
    if rest.contains(',') {
        return Err("options after the port (such as ,ipv4=on) are not supported");
    }
    if !rest.starts_with('[') && host.contains(':') {
        return Err("write an IPv6 number in brackets: [NUMBER]:PORT");
    }
    if host.contains('/') {
        return Err("a slash is not allowed: write HOST:PORT");
    }
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    match port.parse() {
        Ok(port) if digits => Ok((host.to_owned(), port)),
        _ => Err("the port must be a number from 0 to 65535; service names are not resolved"),
    }
}

/// Parses `PATH[,offset=N]`, split at the first `,offset=` as QEMU does.
fn file(rest: &str) -> Result<Address, &'static str> {
    let (path, offset) = match rest.split_once(",offset=") {
        None => (rest, 0),
        Some((path, number)) => {
            (path, size(number).ok_or("offset= needs a number, such as 4096, 0x1000 or 1M")?)
        }
    };
    match path {
        "" => Err("a path must follow file:"),
        path if path.starts_with("/dev/fdset/") => {
            Err("descriptor sets (/dev/fdset) are not supported: give the file's own path")
        }
        path => Ok(Address::File { path: path.into(), offset }),
    }
}

/// Parses a number of bytes.
///
/// Forms: decimal, hexadecimal after `0x`, or decimal with a suffix B, K, M, G, T, P or E.
fn size(text: &str) -> Option<u64> {
    if let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        return u64::from_str_radix(digits, 16).ok().filter(|_| is_number);
    }
    let digits = text.trim_end_matches(|last: char| last.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" | "B" | "b" => 0,
        "K" | "k" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        "T" | "t" => 40,
        "P" | "p" => 50,
        "E" | "e" => 60,
        _ => return None,
    };
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = digits.parse().ok().filter(|_| is_number)?;
    number.checked_mul(1 << shift)
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp { host, port } => place(f, "tcp", host, *port),
            Address::Rdma { host, port } => place(f, "rdma", host, *port),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Fd(name) => write!(f, "fd:{name}"),
            Address::Handed(fd) => write!(f, "fd:{}", fd.name()),
            Address::File { path, offset: 0 } => write!(f, "file:{}", path.display()),
            Address::File { path, offset } => write!(f, "file:{},offset={offset}", path.display()),
        }
    }
}

fn place(f: &mut fmt::Formatter<'_>, kind: &str, host: &str, port: u16) -> fmt::Result {
    match host.contains(':') {
        true => write!(f, "{kind}:[{host}]:{port}"),
        false => write!(f, "{kind}:{host}:{port}"),
    }
}

impl Address {
    /// The host in the address, which a server's certificate must bear. `None` for other addresses than TCP.
    pub fn host(&self) -> Option<&str> {
        match self {
            Address::Tcp { host, .. } if host.is_empty() => Some("localhost"),
            Address::Tcp { host, .. } => Some(host),
            _ => None,
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
            "rdma:host:4444",
            "rdma:[fd08::1]:4444",
            "unix:/tmp/a,b:c",
            "fd:12",
            "fd:mig",
            "file:/tmp/a:b,c",
            "file:image,offset=4097",
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
    fn address_file_offset_is_read_as_qemu_reads_it() {
        for (text, offset) in [
            ("0", 0),
            ("4096", 4096),
            ("0x1000", 4096),
            ("0X1f", 31),
            ("1M", 1 << 20),
            ("2k", 2048),
            ("7B", 7),
        ] {
            let address: Address = format!("file:a b,offset={text}").parse().unwrap();
            assert_eq!(address, Address::File { path: "a b".into(), offset });
        }
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
            ("tcp:[::1]4444", "[NUMBER]:PORT"),
            ("rdma:host", "port"),
            ("rdma:fd08::1:4444", "brackets"),
            ("unix:", "path"),
            ("unix:/a\0b", "NUL"),
            ("file:/a\0b", "NUL"),
            ("rdma:h\0:1", "NUL"),
            ("fd:", "number or name"),
            ("exec:cat", "not supported"),
            ("file:", "path"),
            ("file:,offset=1", "path"),
            ("file:a,offset=", "number"),
            ("file:a,offset=-1", "number"),
            ("file:a,offset=1X", "number"),
            ("file:a,offset=0x", "number"),
            ("file:a,offset=16E", "number"),
            ("file:a,offset=1,offset=2", "number"),
            ("file:/dev/fdset/1", "fdset"),
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
        let long = format!("unix:/{}", "x".repeat(107));
        assert!(long.parse::<Address>().is_err());
    }
}
