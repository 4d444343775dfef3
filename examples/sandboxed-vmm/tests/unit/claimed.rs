//! No command of the operator uses a machine that the engine has not claimed.

use super::*;

#[test]
fn machine_that_the_engine_has_not_claimed_is_given_to_no_command() {
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(error) => {
            let test = "machine_that_the_engine_has_not_claimed_is_given_to_no_command";
            return eprintln!("SKIPPED {test}: /dev/kvm: {error}");
        }
    };
    let mut vmm = Vmm::new(kvm).unwrap();
    let (answer, made) = channel();
    vmm.orders.0.send(Order { configuration: 24u32.to_le_bytes().to_vec(), answer }).unwrap();

    vmm.fill_orders();
    vmm.take_claimed();

    assert!(made.recv().unwrap().is_ok());
    assert!(vmm.command("migrate tcp:127.0.0.1:1").unwrap_err().to_string().contains("no guest"));
    assert!(vmm.status().contains("memory 0 running false"), "{}", vmm.status());
}
