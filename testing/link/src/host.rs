//! A host of the link: a network namespace with one TUN device.

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;

use rustix::thread::{LinkNameSpaceType, UnshareFlags};
use tun_rs::{DeviceBuilder, SyncDevice};

/// A network namespace whose only network is its end of the link.
pub struct Host {
    namespace: File,
    address: Ipv4Addr,
}

impl Host {
    /// Creates the namespace and its device.
    pub(crate) fn new(address: Ipv4Addr, packet_bytes: u16) -> Result<(Self, SyncDevice), String> {
        // In a separate thread, because a thread that creates a namespace stays in it.
        let made = std::thread::scope(|scope| scope.spawn(|| make(address, packet_bytes)).join());
        let (namespace, device) =
            made.map_err(|_| "the thread that makes a network namespace panicked".to_owned())??;
        Ok((Self { namespace, address }, device))
    }

    /// The host's address on the link.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Runs `body` on this host in a new thread, and waits for its end.
    ///
    /// # Panics
    /// `body` panics, or the kernel refuses to move the thread.
    pub fn run<T: Send>(&self, body: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                self.enter().expect("this process made the namespace");
                body()
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Moves the calling thread to this host.
    ///
    /// Sockets that the thread creates from now on, and threads that it starts, are on this host
    /// too.
    ///
    /// # Errors
    /// The kernel refuses to move the thread.
    pub fn enter(&self) -> std::io::Result<()> {
        Ok(rustix::thread::move_into_link_name_space(
            self.namespace.as_fd(),
            Some(LinkNameSpaceType::Network),
        )?)
    }

    /// Sets the congestion control (`reno`, `bbr`, …) of this host's new connections.
    ///
    /// # Errors
    /// The kernel does not provide this congestion control.
    pub fn use_congestion_control(&self, name: &str) -> std::io::Result<()> {
        // The kernel shows the file of the namespace of the thread that opens it.
        self.run(|| std::fs::write("/proc/sys/net/ipv4/tcp_congestion_control", name))
    }
}

fn make(address: Ipv4Addr, packet_bytes: u16) -> Result<(File, SyncDevice), String> {
    // SAFETY: only the network namespace of this thread changes. It was started for this, and no other code runs on it,
    // so none relies on its namespace; files, memory and signal handlers stay shared.
    let own = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) };
    own.map_err(|error| format!("this process may not make a network namespace: {error}"))?;
    let namespace = File::open("/proc/thread-self/ns/net");
    let namespace = namespace.map_err(|error| format!("/proc/thread-self/ns/net: {error}"))?;
    let device = DeviceBuilder::new().ipv4(address, 24, None).mtu(packet_bytes).build_sync();
    let device = device.map_err(|error| format!("no TUN device in a network namespace: {error}"))?;
    device.set_nonblocking(true).map_err(|error| format!("TUN device: {error}"))?;
    Ok((namespace, device))
}
