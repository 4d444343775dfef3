//! The guest that migrates there and back, and its settings.

use std::sync::Arc;

use sterna::{
    Address, Arrival, Capabilities, Compression, Incoming, Migration, Outcome, Parameters, SourceVm,
    Statistics, TargetVm, Vm,
};
use sterna_guests::model::{Fill as GuestFill, Pattern};
use sterna_guests::process::{ProcessConfig, ProcessGuest, Tracking};
use sterna_ram::{Backing, GuestRam, RamBlock};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

use crate::sample::{Sample, time};
use crate::{Args, Codec, Dirty, Fill, Memory};

type Failure = Box<dyn std::error::Error>;

/// A guest, and the memory that it migrates to. After each migration, the remaining copy is migrated again.
pub struct Pair {
    config: ProcessConfig,
    here: Arc<ProcessGuest>,
    there: GuestRam,
}

impl Pair {
    pub fn new(args: &Args) -> Result<Self, Failure> {
        let config = config(args);
        let here = ProcessGuest::boot_in(config.clone(), ram(args)?)?;
        if args.fill == Fill::Zero {
            populate(&here.ram())?;
        }
        Ok(Self { here, there: ram(args)?, config })
    }

    pub fn source_ram(&self) -> GuestRam {
        self.here.ram()
    }

    pub fn target_ram(&self) -> &GuestRam {
        &self.there
    }

    /// Runs one migration. The time ends when both sides report the end.
    pub fn migrate(&self, args: &Args) -> Result<Sample, Failure> {
        let source = &self.here;
        let may_discard = self.there.blocks().iter().all(|block| block.permissions().discard);
        let there = if args.fresh && !may_discard { ram(args)? } else { self.there.clone() };
        if !args.fresh {
            populate(&there)?;
        } else if may_discard {
            there.blocks().iter().try_for_each(RamBlock::discard_all)?;
        }
        // The guest of the last migration is not needed any more.
        there.has_no_guest().map_err(|custody| format!("the guest is {custody:?}"))?;
        let target = ProcessGuest::waiting_in(self.config.clone(), there)?;
        let (params, capabilities) = settings(args);
        let address: Address = "tcp:127.0.0.1:0".parse()?;
        let vm: Arc<dyn TargetVm> = target;
        let incoming = Incoming::listen(vm, &address, params.clone(), capabilities, Arc::new(()))?;
        if args.dirty > 0 {
            source.cont()?;
        }
        // In the engine's view, the guest has left this memory. Each migration therefore starts with a new
        // guest.
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

/// One block of RAM, of the size, content and kind in the arguments.
fn ram(args: &Args) -> Result<GuestRam, Failure> {
    const NAME: &str = "ram.low";
    let bytes = args.ram << 20;
    let own = |backing| Ok(GuestRam::new(vec![RamBlock::new(NAME, bytes, backing)?])?);
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let mapping = MmapRegionBuilder::new(bytes as usize).with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE);
    let mapping = match args.backing {
        Memory::Memfd => return own(Backing::Memfd),
        Memory::Anonymous => return own(Backing::Anonymous),
        Memory::VmmAnonymous => mapping.with_mmap_flags(private),
        Memory::VmmMemfd => {
            let file = std::fs::File::from(rustix::fs::memfd_create(NAME, rustix::fs::MemfdFlags::CLOEXEC)?);
            file.set_len(bytes)?;
            mapping.with_mmap_flags(libc::MAP_SHARED).with_file_offset(FileOffset::new(file, 0))
        }
    };
    let region = GuestRegionMmap::<()>::new(mapping.build()?, GuestAddress(0)).ok_or("no such region")?;
    let memory = GuestMemoryMmap::from_regions(vec![region])?;
    Ok(GuestRam::from_guest_memory(&memory, |_, _| NAME)?)
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
            Memory::Memfd | Memory::VmmMemfd => Backing::Memfd,
            Memory::Anonymous | Memory::VmmAnonymous => Backing::Anonymous,
        },
        // Tracking must not cost anything with an idle guest. KVM's log also costs almost nothing there.
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
