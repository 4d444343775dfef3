//! Conversion of socket addresses to and from the C structures of the connection manager.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};

/// The C structure of an address, in storage that is large enough for every family.
pub(crate) fn to_c(address: SocketAddr) -> libc::sockaddr_storage {
    // SAFETY: zero is a valid value for every field of this structure of integers.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let at = &raw mut storage;
    match address {
        SocketAddr::V4(v4) => {
            let inner = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: the storage is larger than any address, and aligned for all of them.
            unsafe { at.cast::<libc::sockaddr_in>().write(inner) };
        }
        SocketAddr::V6(v6) => {
            let inner = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above.
            unsafe { at.cast::<libc::sockaddr_in6>().write(inner) };
        }
    }
    storage
}

/// The internet address in a C structure; `None` for other families.
pub(crate) fn from_c(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let at = &raw const *storage;
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family identifies the structure; the storage is large enough and aligned for it.
            let inner = unsafe { &*at.cast::<libc::sockaddr_in>() };
            let ip = IpAddr::from(inner.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddr::new(ip, u16::from_be(inner.sin_port)))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let inner = unsafe { &*at.cast::<libc::sockaddr_in6>() };
            let (ip, port) = (inner.sin6_addr.s6_addr.into(), u16::from_be(inner.sin6_port));
            Some(SocketAddrV6::new(ip, port, inner.sin6_flowinfo, inner.sin6_scope_id).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back_from_c() {
        for text in ["10.9.0.1:4444", "[fd09::1]:65535", "[fe80::1%3]:1", "[::]:0"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(from_c(&to_c(address)), Some(address));
        }
        // SAFETY: zero is a valid value for every field of this structure of integers.
        assert_eq!(from_c(&unsafe { std::mem::zeroed() }), None);
    }
}
