//! Scenarios with soft-RoCE. They prove that the double of `sterna_transport::rdma`, which all other tests
//! use, behaves like it. Guests also move over it ([`qemu`], [`sterna`]).

#![allow(clippy::print_stdout)]

pub(super) mod bench;
mod blocks;
mod capture;
mod child;
mod command;
mod golden;
mod qemu;
pub(super) mod reliability;
pub(super) mod sandboxed;
mod sterna;
pub(super) mod two;
mod way;
mod wire;

use std::net::IpAddr;
use std::process::Command;
use std::sync::Arc;

use sterna_transport::rdma::conformance::{Setup, cases};
use sterna_transport::rdma::{Fabric, PortState, VerbsFabric};

use crate::kernel::output;
use crate::scenarios::Failure;

const ADDRESS: &str = "10.8.0.1";
const ADDRESS_V6: &str = "fd08::1";

/// Makes a soft-RoCE device over a dummy interface, whose MTU allows the largest packets.
pub(super) fn prepare() -> Result<(), Failure> {
    for line in [
        "ip link set lo up",
        "ip link add d0 type dummy",
        "ip link set d0 mtu 9000 up",
        &format!("ip addr add {ADDRESS}/24 dev d0"),
        &format!("ip addr add {ADDRESS_V6}/64 dev d0 nodad"),
        "rdma link add rxe0 type rxe netdev d0",
    ] {
        let mut words = line.split(' ');
        output(Command::new(words.next().unwrap_or_default()).args(words))?;
    }
    Ok(())
}

/// A scenario with soft-RoCE.
pub(super) struct Scenario {
    pub(super) name: String,
    /// The scenario runs only on request.
    pub(super) is_long: bool,
    /// The scenario shows that the lab works and does not test Sterna. If it fails, it is reported as
    /// skipped.
    pub(super) is_control: bool,
    pub(super) run: Box<dyn FnOnce() -> Result<(), Failure>>,
}

impl Scenario {
    fn short(name: impl Into<String>, run: impl FnOnce() -> Result<(), Failure> + 'static) -> Self {
        Self { name: name.into(), is_long: false, is_control: false, run: Box::new(run) }
    }

    fn long(name: impl Into<String>, run: impl FnOnce() -> Result<(), Failure> + 'static) -> Self {
        Self { is_long: true, ..Self::short(name, run) }
    }

    fn control(self) -> Self {
        Self { is_control: true, ..self }
    }
}

pub(super) fn scenarios() -> Vec<Scenario> {
    let of = |address: &'static str| {
        cases().map(move |(name, run)| {
            Scenario::short(format!("rdma, {address}: {name}"), move || {
                run(&setup(address)?);
                Ok(())
            })
        })
    };
    let report = Scenario::short("rdma: the device is reported", reported);
    std::iter::once(report)
        .chain(of(ADDRESS))
        .chain(of(ADDRESS_V6))
        .chain(qemu::scenarios())
        .chain(sterna::scenarios())
        .chain(command::scenarios())
        .chain(sandboxed::scenarios())
        .collect()
}

fn setup(address: &str) -> Result<Setup, Failure> {
    let address: IpAddr = address.parse().map_err(|_| format!("{address} is no address"))?;
    let fabric: Arc<dyn Fabric> = Arc::new(VerbsFabric::new());
    Ok(Setup::new(fabric.clone(), fabric, Arc::new(VerbsFabric::new()), address))
}

fn reported() -> Result<(), Failure> {
    let adapters = VerbsFabric::new().adapters().map_err(|error| error.to_string())?;
    let [adapter] = &adapters[..] else { return Err(format!("{} devices", adapters.len())) };
    let addresses: Vec<String> = adapter.addresses.iter().map(ToString::to_string).collect();
    let is_right = adapter.device == "rxe0"
        && adapter.port == 1
        && adapter.state == PortState::Active
        && adapter.active_mtu == 4096
        && addresses == [ADDRESS, ADDRESS_V6]
        && adapter.max_message_bytes >= 1 << 20
        && adapter.max_work_requests >= 512
        && adapter.max_completions >= 1024
        && adapter.max_registration_bytes >= 1 << 30
        && !adapter.on_demand_paging;
    if is_right { Ok(()) } else { Err(format!("{adapter:?}")) }
}
