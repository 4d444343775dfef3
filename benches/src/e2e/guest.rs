//! The guest that is migrated there and back, and its settings.

use std::sync::Arc;

use sterna::{
    Address, Arrival, Capabilities, Compression, Incoming, Migration, Outcome, Parameters, SourceVm,
    Statistics, TargetVm, Vm,
};
use sterna_guests::model::{Fill as GuestFill, Pattern};
use sterna_guests::process::{ProcessConfig, ProcessGuest, Tracking};
use sterna_ram::{Backing, GuestRam, RamBlock};

use crate::sample::{Sample, time};
use crate::{Args, Codec, Dirty, Fill, Memory};

type Failure = Box<dyn std::error::Error>;

/// A guest, and memory for it to move to. The guest that was left behind is migrated again.
pub struct Pair {
    config: ProcessConfig,
    here: Arc<ProcessGuest>,
    there: GuestRam,
}

impl Pair {
    pub fn new(args: &Args) -> Result<Self, Failure> {
        let config = config(args);
        let here = ProcessGuest::boot(config.clone())?;
        if args.fill == Fill::Zero {
            populate(&here.ram())?;
        }
        let blocks = config.blocks.iter();
        let blocks = blocks
            .map(|(name, bytes)| RamBlock::new(name.as_str(), *bytes, config.backing))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self { here, there: GuestRam::new(blocks)?, config })
    }

    pub fn source_ram(&self) -> GuestRam {
        self.here.ram()
    }

    pub fn target_ram(&self) -> &GuestRam {
        &self.there
    }

    /// One migration, timed from its start until both sides say that it is over.
    pub fn migrate(&self, args: &Args) -> Result<Sample, Failure> {
        let source = &self.here;
        if args.fresh {
            self.there.blocks().iter().try_for_each(RamBlock::discard_all)?;
        } else {
            populate(&self.there)?;
        }
        // The guest of the last migration is not needed any more.
        self.there.has_no_guest().map_err(|custody| format!("the guest is {custody:?}"))?;
        let target = ProcessGuest::waiting_in(self.config.clone(), self.there.clone())?;
        let (params, capabilities) = settings(args);
        let address: Address = "tcp:127.0.0.1:0".parse()?;
        let vm: Arc<dyn TargetVm> = target;
        let incoming = Incoming::listen(vm, &address, params.clone(), capabilities, Arc::new(()))?;
        if args.dirty > 0 {
            source.cont()?;
        }
        // It has left before, as far as the engine knows: each migration begins with a new one.
        if let Err(custody) = source.ram().has_new_guest() {
            return Err(format!("the guest is {custody:?}").into());
        }
        let vm: Arc<dyn SourceVm> = Arc::clone(source) as _;
        let mut statistics = None;
        let sample = time(self.there.total_bytes(), || -> Result<(), Failure> {
            let migration = Migration::start(vm, &incoming.address(), params, capabilities, Arc::new(()))?;
            match (migration.wait(), incoming.wait()) {
                (Outcome::Completed, Arrival::Completed(_)) => {
                    statistics = Some(migration.statistics());
                    Ok(())
                }
                (outcome, arrival) => Err(format!("{outcome:?}, {arrival:?}").into()),
            }
        })?;
        if let Some(statistics) = statistics.filter(|_| args.timeline) {
            print_timeline(&statistics, &sample);
        }
        Ok(sample)
    }
}

fn populate(ram: &GuestRam) -> Result<(), Failure> {
    for block in ram.blocks() {
        block.populate(0, block.pages())?;
    }
    Ok(())
}

fn config(args: &Args) -> ProcessConfig {
    ProcessConfig {
        blocks: vec![("ram.low".to_owned(), args.ram << 20)],
        backing: match args.backing {
            Memory::Memfd => Backing::Memfd,
            Memory::Anonymous => Backing::Anonymous,
        },
        // An idle guest's writes need no tracking that costs: KVM's log, too, is all but free there.
        tracking: if args.dirty == 0 { Tracking::Software } else { Tracking::Automatic },
        rate: args.dirty,
        pattern: match args.pattern {
            Dirty::Sequential => Pattern::Sequential,
            Dirty::Random => Pattern::Random,
            Dirty::HotSet => Pattern::HotSet,
        },
        fill: match args.fill {
            Fill::Random => GuestFill::Random(1),
            Fill::Zero => GuestFill::Zero,
            Fill::Half => GuestFill::Half(1),
        },
        ..ProcessConfig::default()
    }
}

fn settings(args: &Args) -> (Parameters, Capabilities) {
    let params = Parameters {
        max_bandwidth_bytes: 0,
        multifd_channels: args.channels.max(1),
        multifd_compression: match args.compression {
            Codec::None => Compression::None,
            Codec::Zlib => Compression::Zlib,
            Codec::Zstd => Compression::Zstd,
        },
        ..Parameters::default()
    };
    (params, Capabilities { multifd: args.channels > 0, ..Capabilities::default() })
}

fn print_timeline(statistics: &Statistics, sample: &Sample) {
    println!("total {:?}, setup {:?}", sample.took, statistics.setup_time);
    for round in &statistics.rounds {
        println!(
            "  round {} began {:?}, took {:?}, {} pages, {} bytes, sync {:?}",
            round.number, round.began, round.took, round.pages, round.bytes, round.sync
        );
    }
    println!("  downtime {:?}: {:?}", statistics.downtime, statistics.switchover);
}
