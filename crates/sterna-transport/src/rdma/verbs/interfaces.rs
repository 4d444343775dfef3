//! IP addresses of this host's network interfaces, to find those with an RDMA device.

use std::ffi::CStr;
use std::net::IpAddr;

use super::sockaddr;

/// An IP address with the name of its interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InterfaceAddress {
    pub(crate) interface: String,
    pub(crate) address: IpAddr,
}

/// All addresses that a peer can use: no loopback and no link-local addresses.
pub(crate) fn addresses() -> Vec<InterfaceAddress> {
    let mut first = std::ptr::null_mut();
    // SAFETY: the list is written before the call returns 0.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Vec::new();
    }
    let (mut found, mut next) = (Vec::new(), first);
    // SAFETY: the list belongs to this function until it is freed below; a null pointer ends it.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: the name is a C string that lives as long as the list.
        let interface = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
        // SAFETY: the address is null, or as long as its family requires.
        if let Some(address) = unsafe { address_at(entry.ifa_addr) }.filter(is_told) {
            found.push(InterfaceAddress { interface, address });
        }
    }
    // SAFETY: freed once, and nothing refers to the list any more.
    unsafe { libc::freeifaddrs(first) };
    found
}

/// # Safety
/// `at` must be null or point to an address that is as long as its family requires.
unsafe fn address_at(at: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: guaranteed by the caller.
    let family = i32::from(unsafe { at.as_ref() }?.sa_family);
    let len = match family {
        libc::AF_INET => size_of::<libc::sockaddr_in>(),
        libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
        _ => return None,
    };
    // SAFETY: zero is a valid value for every field of this structure of integers.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    // SAFETY: as many bytes as the family requires are readable at `at`, and the storage is larger.
    unsafe { std::ptr::copy_nonoverlapping(at.cast::<u8>(), (&raw mut storage).cast(), len) };
    sockaddr::from_c(&storage).map(|address| address.ip())
}

fn is_told(address: &IpAddr) -> bool {
    let is_of_one_link = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !address.is_loopback() && !is_of_one_link
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_host_are_none_that_only_it_can_use() {
        assert!(addresses().iter().all(|found| !found.interface.is_empty() && is_told(&found.address)));
    }

    #[test]
    fn addresses_for_one_host_or_link_are_not_told() {
        for text in ["127.0.0.1", "::1", "169.254.1.1", "fe80::1"] {
            assert!(!is_told(&text.parse().unwrap()), "{text}");
        }
        assert!(is_told(&"10.9.0.1".parse().unwrap()) && is_told(&"fd09::1".parse().unwrap()));
    }
}
