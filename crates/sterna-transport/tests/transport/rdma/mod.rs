//! RDMA over the double: hosts, adapters and a network inside the process.

mod costs;
mod double;
mod endpoint;
mod stream;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use sterna_ram::{Backing, RamBlock};
use sterna_transport::CancelFlag;
use sterna_transport::rdma::double::{Host, Network, Settings};
use sterna_transport::rdma::{
    Access, Adapter, Completion, ConnectParameters, Connection, Fabric, Memory, Operation, Piece, Queue,
    QueuePairAttributes, Registration, SendRequest, Wake,
};

const LONG: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;

/// A network with a source and a destination.
struct Lab {
    network: Network,
    source: Host,
    destination: Host,
}

/// Both ends of an established connection.
struct Joined {
    source: Arc<dyn Connection>,
    destination: Arc<dyn Connection>,
}

fn address(of: u8) -> IpAddr {
    [10, 0, 0, of].into()
}

impl Lab {
    fn new(settings: Settings) -> Self {
        let network = Network::new(settings).unwrap();
        let (source, destination) =
            (network.host(&[address(1)]), network.host(&[address(2), "fd00::2".parse().unwrap()]));
        Self { network, source, destination }
    }

    fn join(&self) -> Joined {
        self.join_with(&QueuePairAttributes::new(64, 16).with_remote_write())
    }

    fn join_with(&self, attributes: &QueuePairAttributes) -> Joined {
        let flag = CancelFlag::new();
        let listener = self.destination.listen((address(2), 0).into(), 4).unwrap();
        let source =
            self.source.resolve(listener.local_address(), LONG, &flag).unwrap().open(attributes).unwrap();
        let destination = std::thread::scope(|scope| {
            let accepted = scope.spawn(|| {
                let connection = listener.accept(Some(LONG), &flag).unwrap().open(attributes).unwrap();
                connection.establish(&ConnectParameters::accept(b""), LONG, &flag).unwrap();
                connection
            });
            source.establish(&ConnectParameters::connect(b""), LONG, &flag).unwrap();
            accepted.join().unwrap()
        });
        Joined { source, destination }
    }
}

fn registered(adapter: &dyn Adapter, block: &RamBlock, access: Access) -> Registration {
    adapter.register(Memory::of_block(block, 0, block.len_bytes() as usize).unwrap(), access).unwrap()
}

fn block(len: usize) -> RamBlock {
    RamBlock::new("ram", len as u64, Backing::Anonymous).unwrap()
}

fn write_to(id: u64, from: Piece, to: &Registration, offset: u64) -> SendRequest {
    let operation = Operation::Write { address: to.memory().address() + offset, rkey: to.rkey() };
    SendRequest { id, operation, from, is_signalled: true }
}

fn send(id: u64, from: Piece) -> SendRequest {
    SendRequest { id, operation: Operation::Send, from, is_signalled: true }
}

/// Waits for the next completion and returns it.
fn complete(connection: &dyn Connection, queue: Queue) -> Completion {
    let woken =
        connection.wait(queue, std::time::Instant::now().checked_add(LONG), &CancelFlag::new()).unwrap();
    assert_eq!(woken, Wake::Completion);
    let mut completions = Vec::new();
    assert_eq!(connection.poll(queue, &mut completions, 1).unwrap(), 1);
    completions[0]
}
