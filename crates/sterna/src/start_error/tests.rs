//! The sentences are whole, and the errors of lower layers stay reachable.

use std::error::Error;
use std::io;

use sterna_ram::RamError;
use sterna_transport::TransportError;
use sterna_transport::rdma::RdmaError;

use super::*;
use crate::error::MigrationError;
use crate::error::tests::assert_whole;

fn told() -> io::Error {
    io::Error::other("told to fail")
}

fn ram() -> Arc<RamError> {
    Arc::new(RamError::Gone { block: "ram.low".into() })
}

/// Every property. A new variant does not compile until it has a place here.
fn images() -> Vec<UnusableImage> {
    use UnusableImage::*;
    let image = || "vm.img".to_owned();
    let all = vec![
        CutOff { image: image() },
        NoBitmaps { image: image() },
        WithoutSharedMemory { image: image() },
        HugePages { image: image(), block: "m0".into() },
        OldMachineType { image: image() },
        PostcopyHadBegun { image: image(), number: 5 },
        Sections { image: image(), place: "before RAM", flaw: "command 99 is unknown".into() },
        OtherBlocks,
        NotArrived,
        Unreadable(Arc::new(told())),
    ];
    for cause in &all {
        match cause {
            CutOff { .. } | NoBitmaps { .. } | WithoutSharedMemory { .. } | HugePages { .. } => {}
            OldMachineType { .. } | PostcopyHadBegun { .. } | Sections { .. } => {}
            OtherBlocks | NotArrived | Unreadable(_) => {}
        }
    }
    all
}

fn sharing() -> Vec<Unsharable> {
    use Unsharable::*;
    let all = vec![
        MappedByDevice { device: "vhost-user disk".into() },
        Block(ram()),
        TooManyBlocks { blocks: 300, most: 253 },
    ];
    for cause in &all {
        match cause {
            MappedByDevice { .. } | Block(_) | TooManyBlocks { .. } => {}
        }
    }
    all
}

fn refusals() -> Vec<SystemRefusal> {
    use SystemRefusal::*;
    let cancelled = TransportError::Cancelled { channel: "tcp:192.0.2.1:1".into() };
    let all = vec![
        Transport(Arc::new(cancelled)),
        Rdma(Arc::new(RdmaError::NoDevice { address: "192.0.2.1:1".into(), having: Vec::new() })),
        Ram(ram()),
        Image(Arc::new(told())),
        Engine(Arc::new(MigrationError::system("thread \"lane\": told to fail".into(), told()))),
    ];
    for cause in &all {
        match cause {
            Transport(_) | Rdma(_) | Ram(_) | Image(_) | Engine(_) => {}
        }
    }
    all
}

#[test]
fn every_sentence_is_whole() {
    let all = images().into_iter().map(StartError::from);
    let all = all.chain(sharing().into_iter().map(StartError::from));
    for error in all.chain(refusals().into_iter().map(StartError::from)) {
        assert_whole(&error.to_string());
    }
}

#[test]
fn every_cause_keeps_the_error_of_the_layer_below() {
    let errors: [StartError; 8] = [
        UnusableImage::Unreadable(Arc::new(told())).into(),
        Unsharable::Block(ram()).into(),
        StartError::DamagedImage(Arc::new(told())),
        StartError::Postcopy(Arc::new(MissingPagesError::Discard(RamError::Gone { block: "m0".into() }))),
        StartError::system(TransportError::Cancelled { channel: "tcp:192.0.2.1:1".into() }),
        StartError::system(RamError::Gone { block: "m0".into() }),
        StartError::system(MigrationError::Cancelled),
        SystemRefusal::Image(Arc::new(told())).into(),
    ];
    for error in errors {
        let source = error.source().unwrap_or_else(|| panic!("no source: {error:?}"));
        assert!(error.to_string().contains(&source.to_string()), "{error}: {source}");
    }
}

#[test]
fn refusal_of_an_occupied_place_names_the_call_that_frees_it() {
    for (custody, call) in [
        (Custody::Arrived, "GuestRam::has_no_guest"),
        (Custody::NoGuest, "GuestRam::has_new_guest"),
        (Custody::Undecided, "Migration::decide"),
        (Custody::Held, "Migration::retry"),
        (Custody::Saved, "Migration::resume_saved"),
        (Custody::Arriving { is_free: false }, "Incoming::release"),
    ] {
        let text = StartError::Guest(custody).to_string();
        assert_whole(&text);
        assert!(text.contains(call), "{text}");
    }
}
