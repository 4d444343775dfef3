//! A source that withholds the last message of the connection manager (RTU). The source's end is connected, and the
//! destination's queue pair is ready. The destination waits for the message until its limit passes, and the migration
//! continues in parallel.

use std::sync::{Arc, Mutex};

use sterna::rdma::SourceStream;
use sterna::{Capabilities, Hook, Incoming, TargetVm, Vm, VmError};
use sterna_guests::process::ProcessGuest;
use sterna_transport::rdma::double::{Network, Settings};
use sterna_transport::rdma::{
    CompletionStatus, ConnectParameters, Endpoint, EndpointSizes, Fabric, RdmaError, Write,
};
use sterna_transport::{ByteStream, CancelFlag};
use sterna_wire::extension::PREPARE_PING;
use sterna_wire::rdma::{ConnectRequest, Introduction, MESSAGE_BYTES, Part};

use super::source::{Guest, Habits, Source, returned, write_all};
use super::{LIMIT, LONG, Lab, address, assert_same, capabilities, small};
use crate::common;
use crate::support::{TestVm, eventually};

const SESSION: [u8; 16] = [7; 16];

fn introduced_as(part: Part) -> Vec<u8> {
    let lanes = if part == Part::Question { 0 } else { 2 };
    let introduction =
        Introduction { part, lanes, session: SESSION, ..Habits::sterna(1).introduction.unwrap() };
    ConnectRequest { pin_all: false, introduction: Some(introduction) }.to_bytes()
}

fn dial(lab: &Lab, part: Part) -> Result<Endpoint, RdmaError> {
    let sizes = EndpointSizes::messages(MESSAGE_BYTES as u32, 4, 4).with_writes(4);
    let route = lab.source.resolve(lab.to(), LONG, &CancelFlag::new())?;
    let endpoint = Endpoint::new(route.open(&sizes.attributes())?, &sizes)?;
    endpoint.post_receives(4)?;
    let private_data = introduced_as(part);
    let parameters = ConnectParameters::connect(&private_data);
    endpoint.connection().establish(&parameters, LONG, &CancelFlag::new())?;
    Ok(endpoint)
}

fn write_over(endpoint: &Endpoint, write: Write) -> Result<(), RdmaError> {
    endpoint.write(&[write], LIMIT)?;
    endpoint.flush(LIMIT)
}

fn assert_refused(tried: &Result<(), RdmaError>) {
    let refused = CompletionStatus::RemoteInvalidRequest;
    assert!(
        matches!(tried, Err(RdmaError::Failed { status, .. }) if *status == refused),
        "it could write: {tried:?}"
    );
}

/// Sends all of RAM. Returns a write that would change it.
fn send_ram<'a>(lab: &Lab, guest: &'a Guest, habits: Habits) -> (Source<'a>, Write) {
    let mut source = Source::start(lab, guest, habits);
    source.begin(false).unwrap();
    source.send_block(0).unwrap();
    source.send_block(1).unwrap();
    source.finish().unwrap();
    source.begin(true).unwrap();
    source.finish().unwrap();
    let rkey = source.keys[&(0, 0)];
    let to = source.places.blocks()[0].host_address;
    let write = source.request(source.range(1, 0, 65536), source.keys[&(1, 0)]);
    (source, Write { address: to, rkey, ..write })
}

#[test]
fn question_cannot_write_after_all_is_prepared() {
    let (guest, rest) = Guest::new(&small()).with_return_path().with_handover(SESSION).split_at_prepare();
    for withholds in [true, false] {
        let lab = Lab::with(Settings::new(), &small(), |_| ());
        let (source, write) = send_ram(&lab, &guest, Habits::sterna(1).with_return_path());
        write_all(&source.stream, &guest.to_end()).unwrap();
        let mut pong = [0; 8];
        let mut count = 0;
        while count < pong.len() {
            count += source.stream.read(&mut pong[count..], LIMIT).unwrap();
        }
        let value = PREPARE_PING.to_be_bytes();
        assert_eq!(pong, [0, 2, 0, 4, value[0], value[1], value[2], value[3]]);
        if withholds {
            lab.network.withhold_confirmations(&lab.source, 0);
        }

        for _ in 0..if withholds { 1 } else { 50 } {
            let question = dial(&lab, Part::Question).unwrap();
            assert_refused(&write_over(&question, write));
        }

        assert_same(&guest.ram, &lab.target.ram());
        write_all(&source.stream, &rest).unwrap();
        assert_eq!(returned(&source.stream), [0, 1, 0, 4, 0, 0, 0, 0]);
        lab.assert_arrived(&guest);
        drop(source);
        lab.assert_empty();
    }
}

/// Writes over the return path when the destination acquires its hooks: all state is loaded, and the guest does not
/// run yet.
struct Tries {
    source: Arc<SourceStream>,
    write: Write,
    tried: Mutex<Vec<Result<(), RdmaError>>>,
}

impl Hook for Tries {
    fn name(&self) -> String {
        "tries".to_owned()
    }
    fn release(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn take_back(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn acquire(&self) -> Result<(), VmError> {
        self.tried.lock().unwrap().push(write_over(self.source.back().unwrap(), self.write));
        Ok(())
    }
}

#[test]
fn return_path_cannot_write_while_it_is_being_accepted() {
    let guest = Guest::new(&small());
    let lab = Lab::with(Settings::new(), &small(), |_| ());
    // The main connection is confirmed, the return path is not.
    lab.network.withhold_confirmations(&lab.source, 1);
    let (source, write) = send_ram(&lab, &guest, Habits::sterna(1).with_return_path());
    let hook = Arc::new(Tries { source: source.stream.clone(), write, tried: Mutex::default() });
    lab.target.guest.add_hook(hook.clone());

    write_all(&source.stream, &guest.to_end()).unwrap();

    lab.assert_arrived(&guest);
    let tried = hook.tried.lock().unwrap();
    assert_eq!(tried.len(), 1);
    assert_refused(&tried[0]);
    drop(tried);
    drop((source, hook));
    lab.assert_empty();
}

fn lab_with_lanes() -> Lab {
    common::trace();
    let network = Network::new(Settings::new()).unwrap();
    let (source, destination) = (network.host(&[address(1)]), network.host(&[address(2)]));
    let target = TestVm::new(ProcessGuest::waiting(small()).unwrap());
    let mut params = common::parameters();
    params.multifd_channels = 2;
    params.rdma.fabric = Some(Arc::new(destination.clone()));
    let log = Arc::new(common::Log::default());
    let (vm, at): (Arc<dyn TargetVm>, _) = (target.clone(), "rdma:10.0.0.2:0".parse().unwrap());
    let capabilities = Capabilities { multifd: true, ..capabilities() };
    let incoming = Mutex::new(Incoming::listen(vm, &at, params, capabilities, log.clone()).unwrap());
    Lab { network, source, destination, target, incoming, log }
}

/// The next source registers memory in the same protection domain.
#[test]
fn lane_that_is_being_accepted_ends_with_its_main_connection() {
    let lab = lab_with_lanes();
    lab.network.withhold_confirmations(&lab.source, 1);
    let main = dial(&lab, Part::Main).unwrap();
    let lane = dial(&lab, Part::Lane(1)).unwrap();
    assert_eq!(lab.network.writable_queue_pairs(&lab.destination), 2);

    main.shutdown();

    // Long before the lane's own limit.
    eventually("the lane's end", || lab.network.counts_of(&lab.destination).queue_pairs == 0);
    drop((main, lane));
    lab.assert_empty();
}
