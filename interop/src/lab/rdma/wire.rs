//! Two soft-RoCE devices with a wire between them, over which packets can be lost and late. Over a single device they are looped
//! back, and no queueing discipline sees them.
//!
//! Both ends of the wire are in one network namespace, as soft-RoCE of Linux 6.12 knows no other. So that packets to an address of
//! this machine leave it, rules for what is sent come before the table of local addresses, which then only serves what comes.

use std::process::Command;

use crate::kernel::output;
use crate::scenarios::Failure;

/// Of the two ends.
pub(super) const ADDRESSES: [&str; 2] = ["10.9.0.1", "10.9.0.2"];
const ENDS: [&str; 2] = ["v0", "v1"];
const HARDWARE: [&str; 2] = ["02:00:00:00:00:01", "02:00:00:00:00:02"];
const DEVICES: [&str; 2] = ["rxe1", "rxe2"];

/// The wire; gone when dropped.
pub(super) struct Wire(());

impl Wire {
    /// One that treats packets as `discipline` says, in `tc`'s words (`netem loss 1% delay 5ms`).
    pub(super) fn with(discipline: &str) -> Result<Self, Failure> {
        let wire = Self(());
        run("ip link add v0 type veth peer name v1")?;
        run("ip rule add pref 1000 lookup local")?;
        // The rule that comes before all others.
        run("ip rule del pref 0")?;
        for here in [0, 1] {
            let there = 1 - here;
            let (end, table) = (ENDS[here], 200 + here);
            run(&format!("ip link set {end} address {} mtu 9000 up", HARDWARE[here]))?;
            run(&format!("ip addr add {}/24 dev {end}", ADDRESSES[here]))?;
            set(end, "accept_local", "1")?;
            set(end, "rp_filter", "0")?;
            run(&format!("ip neigh replace {} lladdr {} dev {end}", ADDRESSES[there], HARDWARE[there]))?;
            run(&format!("ip rule add pref {table} iif lo to {} lookup {table}", ADDRESSES[there]))?;
            run(&format!(
                "ip route add {} dev {end} src {} table {table}",
                ADDRESSES[there], ADDRESSES[here]
            ))?;
            run(&format!("tc qdisc add dev {end} root {discipline}"))?;
        }
        for (device, end) in DEVICES.iter().zip(ENDS) {
            run(&format!("rdma link add {device} type rxe netdev {end}"))?;
        }
        Ok(wire)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        // What is not there need not be taken away.
        for line in [
            "rdma link del rxe1",
            "rdma link del rxe2",
            "ip link del v0",
            "ip rule add pref 0 lookup local",
            "ip rule del pref 1000",
            "ip rule del pref 200",
            "ip rule del pref 201",
        ] {
            let _ = run(line);
        }
    }
}

fn set(end: &str, name: &str, value: &str) -> Result<(), Failure> {
    let path = format!("/proc/sys/net/ipv4/conf/{end}/{name}");
    std::fs::write(&path, value).map_err(|error| format!("{path}: {error}"))
}

fn run(line: &str) -> Result<(), Failure> {
    let mut words = line.split(' ');
    output(Command::new(words.next().unwrap_or_default()).args(words)).map(drop)
}
