//! State and limits of the ports of this host's devices.

use std::ffi::{CStr, c_int};
use std::mem::{MaybeUninit, offset_of};
use std::net::IpAddr;

use super::abi::*;
use super::interfaces;
use super::library::Library;
use super::sysfs::Sysfs;
use crate::rdma::adapter::{AdapterInfo, PortState};
use crate::rdma::error::RdmaError;

/// All ports of all devices that can be opened.
pub(crate) fn all(library: &'static Library) -> Result<Vec<AdapterInfo>, RdmaError> {
    let mut count: c_int = 0;
    // SAFETY: the count is written before the call returns.
    let list = unsafe { (library.verbs.ibv_get_device_list)(&raw mut count) };
    if list.is_null() {
        return match std::io::Error::last_os_error() {
            // No kernel module for RDMA is loaded.
            error if error.raw_os_error() == Some(libc::ENOSYS) => Ok(Vec::new()),
            error => Err(super::errno::error("this host", "ibv_get_device_list", error)),
        };
    }
    let mut infos = Vec::new();
    for index in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list contains `count` devices, and exists until it is freed below.
        let device = unsafe { *list.add(index) };
        // SAFETY: as above; the name lives as long as the device.
        let name = unsafe { CStr::from_ptr((library.verbs.ibv_get_device_name)(device)) };
        let name = name.to_string_lossy().into_owned();
        // SAFETY: as above.
        let context = unsafe { (library.verbs.ibv_open_device)(device) };
        if context.is_null() {
            continue;
        }
        for port in Sysfs::default().ports(&name) {
            infos.push(of_port(library, context, &name, port));
        }
        // SAFETY: the device is open, and no object of the context exists.
        unsafe { (library.verbs.ibv_close_device)(context) };
    }
    // SAFETY: freed once; open contexts do not need the list.
    unsafe { (library.verbs.ibv_free_device_list)(list) };
    Ok(infos)
}

/// State, limits and addresses of one port of an open device.
pub(crate) fn of_port(library: &Library, context: *mut ibv_context, device: &str, port: u8) -> AdapterInfo {
    let mut info = AdapterInfo::new(device, port);
    info.addresses = addresses(device, port);
    let mut attributes = MaybeUninit::<ibv_device_attr>::zeroed();
    // SAFETY: the device is open, and zero is a valid value for every field of this structure of integers.
    let attributes = unsafe {
        (library.verbs.ibv_query_device)(context, attributes.as_mut_ptr());
        attributes.assume_init()
    };
    let port_attributes = self::attributes(library, context, port);
    info.state = match port_attributes.state {
        IBV_PORT_ACTIVE => PortState::Active,
        IBV_PORT_INIT | IBV_PORT_ARMED => PortState::Initialising,
        _ => PortState::Down,
    };
    info.active_mtu = mtu(port_attributes.active_mtu);
    info.max_message_bytes = port_attributes.max_msg_sz;
    info.max_registration_bytes = attributes.max_mr_size;
    info.max_work_requests = u32::try_from(attributes.max_qp_wr).unwrap_or(0);
    info.max_completions = u32::try_from(attributes.max_cqe).unwrap_or(0);
    info.on_demand_paging = has_on_demand_paging(context);
    info
}

/// The attributes of a port that the device reports.
pub(crate) fn attributes(library: &Library, context: *mut ibv_context, port: u8) -> ibv_port_attr {
    let mut attributes = MaybeUninit::<ibv_port_attr>::zeroed();
    // SAFETY: the device is open, and zero is a valid value for every field of this structure of integers. The
    // function with this name fills all fields except the last two bytes.
    unsafe {
        (library.verbs.ibv_query_port)(context, port, attributes.as_mut_ptr());
        attributes.assume_init()
    }
}

/// IP addresses of the network interfaces over a port.
pub(crate) fn addresses(device: &str, port: u8) -> Vec<IpAddr> {
    let over = Sysfs::default().interfaces(device, port);
    let all = interfaces::addresses().into_iter();
    all.filter(|found| over.contains(&found.interface)).map(|found| found.address).collect()
}

/// All addresses of this host that have an RDMA device, each with the device's name.
pub(crate) fn addresses_with_a_device() -> Vec<String> {
    let sysfs = Sysfs::default();
    let ports = sysfs.devices().into_iter().flat_map(|device| {
        let of_device = sysfs.ports(&device).into_iter();
        of_device.map(move |port| (device.clone(), port)).collect::<Vec<_>>()
    });
    ports
        .flat_map(|(device, port)| {
            let of_port = addresses(&device, port).into_iter();
            of_port.map(move |address| format!("{address} ({device})")).collect::<Vec<_>>()
        })
        .collect()
}

/// Converts verbs' number of an MTU into bytes; 0 if it is unknown.
fn mtu(number: u32) -> u32 {
    if (IBV_MTU_256..=IBV_MTU_4096).contains(&number) { 128 << number } else { 0 }
}

/// Whether an RC queue pair can write from and to memory that is not pinned.
pub(crate) fn has_on_demand_paging(context: *mut ibv_context) -> bool {
    // SAFETY: the device is open.
    let is_extended = unsafe { (*context).abi_compat.addr() } == usize::MAX;
    if !is_extended {
        return false;
    }
    // SAFETY: this mark means that the end of the library's `struct verbs_context` precedes the context in memory.
    let end = unsafe { &*context.cast::<verbs_context_end>().sub(1) };
    // `sz` includes the context. A library from before this call has a smaller structure.
    let reaches = end.sz
        >= size_of::<ibv_context>() + size_of::<verbs_context_end>()
            - offset_of!(verbs_context_end, query_device_ex);
    let Some(query) = end.query_device_ex.filter(|_| reaches) else { return false };
    let input = ibv_query_device_ex_input { comp_mask: 0 };
    let mut attributes = MaybeUninit::<ibv_device_attr_ex>::zeroed();
    // SAFETY: the library fills at most the given number of bytes, and zero is a valid value for every field of this
    // structure of integers.
    let attributes = unsafe {
        if query(context, &raw const input, attributes.as_mut_ptr(), size_of::<ibv_device_attr_ex>()) != 0 {
            return false;
        }
        attributes.assume_init()
    };
    attributes.odp_caps.general_caps & IBV_ODP_SUPPORT != 0
        && attributes.odp_caps.rc_odp_caps & IBV_ODP_SUPPORT_WRITE != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtu_is_in_bytes() {
        assert_eq!([1, 2, 3, 4, 5].map(mtu), [256, 512, 1024, 2048, 4096]);
        assert_eq!([0, 6].map(mtu), [0, 0]);
    }
}
