//! Addresses and names of sockets that the VMM or an init system has opened.

use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStringExt;

use rustix::net::getsockname;

use crate::address::Address;
use crate::handed;

/// The address at which a listening socket accepts connections; `None` if no address can name it.
pub(crate) fn listening_at(socket: BorrowedFd<'_>) -> Option<Address> {
    let name = getsockname(socket).ok()?;
    if let Ok(ip) = std::net::SocketAddr::try_from(name.clone()) {
        // An unspecified address means every address, which has an empty host.
        let host = if ip.ip().is_unspecified() { String::new() } else { ip.ip().to_string() };
        return Some(Address::Tcp { host, port: ip.port() });
    }
    let unix = rustix::net::SocketAddrUnix::try_from(name).ok()?;
    let path = unix.path()?.to_bytes().to_vec();
    Some(Address::Unix(std::ffi::OsString::from_vec(path).into()))
}

/// A connected descriptor's name: its peer's address, after the number or name by which the descriptor was given.
pub(crate) fn name_of(address: &Address, socket: BorrowedFd<'_>) -> String {
    match (address.to_string(), handed::peer_of(socket)) {
        (given, peer) if given == format!("fd:{peer}") => peer,
        (given, _) => given,
    }
}
