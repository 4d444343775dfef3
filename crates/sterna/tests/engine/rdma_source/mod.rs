//! The source over RDMA, with hand-made destinations, on adapters inside the process.
#![allow(clippy::print_stdout, reason = "whoever reads of a failure needs the seed")]

mod broken;
mod destination;
mod refused;
mod whole;

use std::sync::Arc;
use std::time::Duration;

use sterna::ram::{Backing, GuestRam, PAGE_SIZE, RamBlock};
use sterna::{
    Address, Capabilities, ChunkSize, Migration, Outcome, Parameters, RdmaParameters, SourceVm, StartError,
};
use sterna_transport::rdma::Fabric;
use sterna_transport::rdma::double::{Host, Network, Settings};

use crate::common::parameters;
use crate::plain::Plain;
use destination::{Destination, Kind, Manner, Seen, contents};

const MIB: u64 = 1 << 20;
/// Lengths that are no multiple of a chunk.
const BLOCKS: [(&str, u64); 3] = [("pc.ram", 9 * MIB + 12288), ("vga", 2 * MIB), ("rom", 8192)];

/// Two hosts in one simulated RDMA network.
struct Lab {
    network: Network,
    source: Host,
    destination: Host,
}

impl Lab {
    fn new(settings: Settings) -> Self {
        let network = Network::new(settings).unwrap();
        let (source, destination) =
            (network.host(&[[10, 0, 0, 1].into()]), network.host(&[[10, 0, 0, 2].into()]));
        Self { network, source, destination }
    }

    fn parameters(&self, chunk: ChunkSize) -> Parameters {
        let fabric: Arc<dyn Fabric> = Arc::new(self.source.clone());
        let rdma = RdmaParameters { chunk, fabric: Some(fabric), ..RdmaParameters::default() };
        Parameters { rdma, downtime_limit: Duration::from_secs(2), ..parameters() }
    }

    /// Asserts that no resource of any migration is left.
    fn assert_empty(&self) {
        assert_eq!(self.network.leaks(), Vec::<String>::new());
        let counts = self.network.counts();
        assert_eq!((counts.rnrs, counts.stale_registrations), (0, 0));
    }
}

fn ram(fill: Option<u8>) -> GuestRam {
    let block = |(name, length): (&str, u64)| {
        let block = RamBlock::new(name, length, Backing::Memfd).unwrap();
        if let Some(byte) = fill {
            block.write(0, &vec![byte; length as usize]).unwrap();
        }
        block
    };
    GuestRam::new(BLOCKS.into_iter().map(block).collect()).unwrap()
}

/// A guest with long and short runs of data, zeros and memory that it never touched.
fn guest(rng: &mut fastrand::Rng) -> Arc<Plain> {
    let ram = ram(None);
    for block in ram.blocks() {
        let (mut page, pages) = (0, block.len_bytes() / PAGE_SIZE as u64);
        while page < pages {
            let longest = *rng.choice(&[1, 3, 40, 900]).unwrap();
            let end = (page + rng.u64(1..=longest)).min(pages);
            let what = rng.u8(0..4);
            for page in page..end {
                let mut bytes = [0; PAGE_SIZE];
                match what {
                    // These pages stay absent.
                    0 => continue,
                    1 => {}
                    _ => rng.fill(&mut bytes),
                }
                block.write(page * PAGE_SIZE as u64, &bytes).unwrap();
            }
            page = end;
        }
    }
    Plain::new(ram)
}

fn start(
    guest: &Arc<Plain>,
    to: &Destination,
    params: Parameters,
    capabilities: Capabilities,
) -> Result<Migration, StartError> {
    let vm: Arc<dyn SourceVm> = Arc::clone(guest) as _;
    let to: Address = to.address.parse().unwrap();
    Migration::start(vm, &to, params, capabilities, Arc::new(()))
}

fn capabilities(has_return_path: bool, rdma_pin_all: bool) -> Capabilities {
    Capabilities { return_path: has_return_path, rdma_pin_all, ..Capabilities::default() }
}

fn manner(kind: Kind, chunk_mib: u64) -> Manner {
    let chunk = ChunkSize::new(chunk_mib * MIB).unwrap();
    Manner {
        kind,
        chunk,
        has_return_path: true,
        ignores_counts: false,
        lies: false,
        gate: None,
        trouble: None,
    }
}

/// Runs a migration to the end. The destination's memory is full of other content before.
fn migrate(
    lab: &Lab,
    guest: &Arc<Plain>,
    manner: Manner,
    params: Parameters,
    rdma_pin_all: bool,
) -> (Outcome, sterna::Statistics, Seen) {
    let target = ram(Some(0xa5));
    let destination = Destination::listen(&lab.destination, target.clone(), manner);
    let capabilities = capabilities(manner.has_return_path, rdma_pin_all);
    let migration = start(guest, &destination, params, capabilities).unwrap();
    let outcome = migration.wait();
    let seen = destination.wait();
    if matches!(outcome, Outcome::Completed) {
        let (here, there) = (contents(&guest.ram), contents(&target));
        for (index, (here, there)) in here.iter().zip(&there).enumerate() {
            let first = here.iter().zip(there).position(|(here, there)| here != there);
            assert_eq!(first, None, "block {index} differs there");
        }
    }
    (outcome, migration.statistics(), seen)
}
