//! A machine that is made from a source's configuration is given to the operator only when the engine has claimed it.

use std::sync::mpsc::{RecvTimeoutError, channel};

use sterna::Vm;
use sterna::ram::Custody;

use super::*;

#[test]
fn machine_is_given_to_the_operator_after_the_engine_has_claimed_it() {
    if let Err(error) = kvm_ioctls::Kvm::new() {
        return eprintln!(
            "SKIPPED machine_is_given_to_the_operator_after_the_engine_has_claimed_it: {error}"
        );
    }
    let home = tempfile::tempdir().unwrap();
    let address = format!("unix:{}", home.path().join("migration").display());
    let ((made, is_made), (go_on, may_return)) = (channel(), channel::<()>());
    let make = move |configuration: &[u8]| -> Result<Arc<dyn TargetVm>, VmError> {
        let vm = Arc::new(Migratable::from_configuration(configuration, None).unwrap());
        made.send(vm.clone()).unwrap();
        // The gap: the operator's thread has the machine, and the engine has not.
        may_return.recv().unwrap();
        Ok(vm)
    };
    let (at, parameters, on) = (address.parse().unwrap(), Parameters::default(), Capabilities::default());
    let settings = SharedSettings::AsSource(SettingLimits { postcopy: false, ..SettingLimits::default() });
    let incoming = Incoming::listen_with(&at, parameters, on, settings, Arc::new(()), make).unwrap();
    let mut source = Migrator::new(Arc::new(Machine::new(2 << 20).unwrap()), None).unwrap();
    source.migrate(&address).unwrap();
    let vm = is_made.recv().unwrap();
    assert_eq!(vm.ram().custody(), Custody::Free);

    let (waited, has_waited) = channel();
    let theirs = incoming.clone();
    std::thread::spawn(move || waited.send(wait_until_claimed(&theirs).is_ok()).unwrap());

    assert_eq!(has_waited.recv_timeout(Duration::from_millis(200)), Err(RecvTimeoutError::Timeout));
    go_on.send(()).unwrap();
    assert_eq!(has_waited.recv(), Ok(true));
    assert_ne!(vm.ram().custody(), Custody::Free);
    assert!(matches!(incoming.wait(), Arrival::Completed(_)), "{:?}", incoming.wait());
}
