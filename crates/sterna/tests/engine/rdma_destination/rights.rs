//! When the guest can start at the destination, the source can no longer write its memory.

use std::sync::{Arc, Mutex};

use sterna::rdma::SourceStream;
use sterna::{Hook, Vm, VmError};
use sterna_transport::ByteStream;
use sterna_transport::rdma::double::Settings;
use sterna_transport::rdma::{CompletionStatus, RdmaError, Write};
use sterna_wire::extension::PREPARE_PING;

use super::source::{Guest, Habits, Source, returned, write_all};
use super::{LIMIT, Lab, assert_same, small};

/// A misbehaving source: writes with a key that is still valid, and bypasses the machine that enforces the rules.
fn write_anyway(stream: &SourceStream, write: Write) -> Result<(), RdmaError> {
    stream.main().write(&[write], LIMIT)?;
    stream.main().flush(LIMIT)
}

fn assert_refused(tried: &Result<(), RdmaError>) {
    let refused = CompletionStatus::RemoteInvalidRequest;
    assert!(
        matches!(tried, Err(RdmaError::Failed { status, .. }) if *status == refused),
        "it could still write: {tried:?}"
    );
}

/// Sends all of the guest up to the end of RAM. Returns a write that would change it.
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
    // Bytes of the second block.
    let write = source.request(source.range(1, 0, 65536), source.keys[&(1, 0)]);
    (source, Write { address: to, rkey, ..write })
}

#[test]
fn source_that_was_told_that_all_is_prepared_cannot_write() {
    let session = Habits::sterna(1).introduction.unwrap().session;
    let (guest, rest) = Guest::new(&small()).with_return_path().with_handover(session).split_at_prepare();
    for (writes, on_demand_paging) in [(true, false), (false, false), (true, true)] {
        let mut settings = Settings::new();
        settings.on_demand_paging = on_demand_paging;
        let lab = Lab::with(settings, &small(), |_| ());
        let (source, write) = send_ram(&lab, &guest, Habits::sterna(1).with_return_path());
        write_all(&source.stream, &guest.to_end()).unwrap();
        let mut pong = [0; 8];
        let mut count = 0;
        while count < pong.len() {
            count += source.stream.read(&mut pong[count..], LIMIT).unwrap();
        }
        let value = PREPARE_PING.to_be_bytes();
        assert_eq!(pong, [0, 2, 0, 4, value[0], value[1], value[2], value[3]]);

        if writes {
            assert_refused(&write_anyway(&source.stream, write));
            // Memory is unchanged, and the guest does not run here.
            assert_same(&guest.ram, &lab.target.ram());
            source.stream.shutdown();
            lab.assert_failed();
        } else {
            write_all(&source.stream, &rest).unwrap();
            assert_eq!(returned(&source.stream), [0, 1, 0, 4, 0, 0, 0, 0]);
            lab.assert_arrived(&guest);
        }
        drop(source);
        lab.assert_empty();
    }
}

/// Writes when the destination acquires its hooks: all state is loaded, and the guest does not run yet.
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
        self.tried.lock().unwrap().push(write_anyway(&self.source, self.write));
        Ok(())
    }
}

#[test]
fn source_that_does_not_prepare_cannot_write_when_all_is_loaded() {
    let guest = Guest::new(&small());
    for habits in [Habits::qemu(1), Habits::sterna(1)] {
        let lab = Lab::with(Settings::new(), &small(), |_| ());
        let (source, write) = send_ram(&lab, &guest, habits);
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
}
