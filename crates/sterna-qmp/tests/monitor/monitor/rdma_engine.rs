//! Tests the migration of a guest over `rdma:` between two monitors, with simulated adapters in this process.

use std::sync::Arc;

use serde_json::{Value, json};
use sterna::{
    Address, Capabilities, Observer, Parameters, RdmaParameters, SourceVm, StartError, TargetVm, Vm as _,
};
use sterna_qmp::Client;
use sterna_qmp::migration::rdma::from_query;
use sterna_qmp::migration::{Engine, Outgoing, Receiving, SternaEngine};
use sterna_transport::rdma::double::{Host, Network, Settings};

use super::engine::{ReadAll, end_of};
use super::support::{ClientExt, FakeVm, Monitor};

const MIB: u64 = 1 << 20;

/// Sterna's engine with the adapters of one simulated host.
struct OnHost(Host);

impl OnHost {
    fn with_adapters(&self, parameters: Parameters) -> Parameters {
        let rdma = RdmaParameters { fabric: Some(Arc::new(self.0.clone())), ..parameters.rdma.clone() };
        Parameters { rdma, ..parameters }
    }
}

impl Engine for OnHost {
    fn start_outgoing(
        &self,
        vm: Arc<dyn SourceVm>,
        to: &Address,
        parameters: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Outgoing>, StartError> {
        SternaEngine.start_outgoing(vm, to, self.with_adapters(parameters), capabilities, observer)
    }

    fn start_incoming(
        &self,
        vm: Arc<dyn TargetVm>,
        at: &Address,
        parameters: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Receiving>, StartError> {
        SternaEngine.start_incoming(vm, at, self.with_adapters(parameters), capabilities, observer)
    }
}

/// Monitors of a running VM and of a waiting VM, each on its own host.
fn pair() -> (Network, (Monitor, Client), (Monitor, Client)) {
    let network = Network::new(Settings::default()).unwrap();
    let host = |last| Arc::new(OnHost(network.host(&[[10, 0, 0, last].into()])));
    let source = Monitor::over(host(1), FakeVm::new(true, true), true).client_of();
    let destination = Monitor::over(host(2), FakeVm::new(false, false), true).client_of();
    (network, source, destination)
}

#[test]
fn guest_moves_over_rdma_whatever_the_chunk_sizes_and_both_monitors_say_what_it_did() {
    for (chunks_mib, pin_all) in [([8, 1], false), ([1, 64], false), ([1, 1], true)] {
        let (network, (source, mut src), (destination, mut dst)) = pair();
        for (client, chunk_mib) in [(&mut src, chunks_mib[0]), (&mut dst, chunks_mib[1])] {
            client.capability("events", true).unwrap();
            client.capability("rdma-pin-all", pin_all).unwrap();
            client.set("x-rdma-chunk-size", json!(chunk_mib * MIB)).unwrap();
        }
        let pattern: Vec<u8> =
            (0..1 << 18).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        source.vm.ram().block(0).write(4096, &pattern).unwrap();

        dst.ok("migrate-incoming", json!({"uri": "rdma:10.0.0.2:0"}));
        let address = dst.ok("query-migrate", Value::Null)["x-sterna-address"].clone();
        assert_ne!(address["port"], "0", "{address}");
        src.ok("migrate", json!({"channels": [{"channel-type": "main", "addr": address}]}));

        assert_eq!(end_of(&mut src), "completed", "{}", src.ok("query-migrate", Value::Null));
        assert_eq!(end_of(&mut dst), "completed", "{}", dst.ok("query-migrate", Value::Null));
        let ram = |vm: &FakeVm| vm.ram().block(0).read_all();
        assert_eq!(ram(&destination.vm)[4096..][..pattern.len()], pattern);
        assert_eq!(ram(&destination.vm), ram(&source.vm));
        assert_eq!(dst.ok("query-status", Value::Null)["status"], "running");
        let did = from_query(&src.ok("query-migrate", Value::Null)).expect("a source over RDMA");
        assert!(did.writes > 0 && did.written_bytes >= pattern.len() as u64, "{did:?}");
        assert!(did.registrations > 0 && did.receiver_not_ready == 0, "{did:?}");
        let there = dst.ok("query-migrate", Value::Null)["x-sterna-rdma"].clone();
        assert!(there["registrations"].as_u64() > Some(0), "{there}");
        assert_eq!(network.counts().rnrs, 0);
    }
}

#[test]
fn what_does_not_go_over_rdma_is_refused_on_either_side_in_one_sentence() {
    let (_network, (_source, mut src), (_destination, mut dst)) = pair();
    for (client, command) in [(&mut src, "migrate"), (&mut dst, "migrate-incoming")] {
        client.capability("mapped-ram", true).unwrap();

        let refusal = client.refused(command, json!({"uri": "rdma:10.0.0.2:4444"}));

        assert!(refusal.contains("mapped-ram"), "{command}: {refusal}");
    }
}
