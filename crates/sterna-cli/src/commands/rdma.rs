//! `sterna rdma`: shows this host's RDMA devices, or checks whether another host is reachable over RDMA.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::time::Duration;

use serde_json::{Value, json};
use sterna_transport::CancelFlag;
use sterna_transport::rdma::{AdapterInfo, Fabric, HostReport, PortReport, RdmaError, VerbsFabric};

use crate::exit::{Done, Status, Stop};
use crate::{terminal, units};

/// Time limit for the resolution of address and route; QEMU uses the same.
const LIMIT: Duration = Duration::from_secs(10);

/// The last line of a report without problems.
const USABLE: &str = "this host can use RDMA";

/// Which host.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Check whether this host can be reached over RDMA: a host name or an IP address. Nothing needs to listen there
    pub host: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Prints the report. The status is 1 if RDMA cannot be used, or if the host cannot be reached.
pub fn execute(arguments: &Arguments) -> Done {
    match &arguments.host {
        None => Ok(report(&HostReport::of_this_host(), arguments.json)),
        Some(host) => try_way(host, arguments.json),
    }
}

fn report(host: &HostReport, as_json: bool) -> Status {
    terminal::print(&if as_json { pretty(&json_of(host)) } else { text_of(host) });
    if host.is_usable() { Status::Done } else { Status::Failed }
}

fn text_of(host: &HostReport) -> String {
    let mut text = String::new();
    for port in &host.ports {
        let info = &port.adapter;
        text += &format!("{} port {}\n", info.device, info.port);
        let mut row = |name: &str, value: String| text += &format!("  {name:<20} {value}\n");
        row("addresses", join(info));
        if port.is_open {
            row("state", info.state.to_string());
            row("packets", units::bytes(u64::from(info.active_mtu)));
            row("longest message", units::bytes(u64::from(info.max_message_bytes)));
            row("on-demand paging", if info.on_demand_paging { "yes" } else { "no" }.to_owned());
        }
        for gid in &port.gids {
            row(&format!("GID {}", gid.index), format!("{} {} {}", gid.gid, gid.kind, gid.interface));
        }
    }
    let limit = host.locked_memory.limit_bytes.map_or_else(|| "no limit".to_owned(), units::bytes);
    text += &format!("locked memory          {limit}\n");
    for sentence in host.missing() {
        text += &format!("missing: {sentence}\n");
    }
    for sentence in host.hints() {
        text += &format!("hint: {sentence}\n");
    }
    text += if host.is_usable() { USABLE } else { "this host cannot use RDMA" };
    text
}

fn json_of(host: &HostReport) -> Value {
    json!({
        "usable": host.is_usable(),
        "library_problem": host.library_problem,
        "connection_manager": host.has_connection_manager,
        "locked_memory_limit_bytes": host.locked_memory.limit_bytes,
        "pinned_bytes": host.locked_memory.pinned_bytes,
        "ports": host.ports.iter().map(json_of_port).collect::<Vec<_>>(),
        "missing": host.missing(),
        "hints": host.hints(),
    })
}

fn json_of_port(port: &PortReport) -> Value {
    let gid = |gid: &sterna_transport::rdma::GidReport| json!({"index": gid.index, "gid": gid.gid, "kind": gid.kind, "interface": gid.interface});
    let mut value = json_of_adapter(&port.adapter);
    value["open"] = port.is_open.into();
    value["gids"] = port.gids.iter().map(gid).collect();
    value
}

fn json_of_adapter(info: &AdapterInfo) -> Value {
    json!({
        "device": info.device,
        "port": info.port,
        "state": info.state.to_string(),
        "addresses": info.addresses.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "active_mtu": info.active_mtu,
        "max_message_bytes": info.max_message_bytes,
        "max_registration_bytes": info.max_registration_bytes,
        "max_work_requests": info.max_work_requests,
        "on_demand_paging": info.on_demand_paging,
    })
}

/// Resolves address and route to the first reachable address of `host`.
fn try_way(host: &str, as_json: bool) -> Done {
    let addresses = addresses_of(host)?;
    let fabric = VerbsFabric::new();
    let mut problem = None;
    for address in addresses {
        match fabric.resolve(address, LIMIT, &CancelFlag::new()) {
            Ok(route) => {
                let adapter = route.adapter();
                found(host, address.ip(), &adapter.info(), as_json);
                return Ok(Status::Done);
            }
            Err(error) => problem = problem.or(Some(error)),
        }
    }
    Err(Stop::failed(problem.as_ref().map_or_else(|| format!("{host} has no address"), RdmaError::to_string)))
}

fn found(host: &str, address: IpAddr, over: &AdapterInfo, as_json: bool) {
    terminal::print(&if as_json {
        pretty(&json!({"host": host, "address": address.to_string(), "over": json_of_adapter(over)}))
    } else {
        format!(
            "{host}: {address} can be reached over port {} of {} ({}; {}), with packets of {} bytes",
            over.port,
            over.device,
            over.state,
            join(over),
            over.active_mtu
        )
    });
}

/// Addresses of a host name, or of an IP address with or without brackets. The port is 0, which means none.
fn addresses_of(host: &str) -> Result<Vec<SocketAddr>, Stop> {
    let name = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    if name.is_empty() || name.contains('/') || name.contains(":") && name.parse::<IpAddr>().is_err() {
        return Err(Stop::usage(format!(
            "`{host}` is not a host: give a host name or an IP address, without a port"
        )));
    }
    match (name, 0).to_socket_addrs() {
        Ok(addresses) => Ok(addresses.collect()),
        Err(error) => Err(Stop::failed(format!("cannot find the host {host}: {error}"))),
    }
}

fn join(info: &AdapterInfo) -> String {
    let addresses: Vec<String> = info.addresses.iter().map(ToString::to_string).collect();
    if addresses.is_empty() { "none".to_owned() } else { addresses.join(", ") }
}

fn pretty(value: &Value) -> String {
    format!("{value:#}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_may_be_a_name_or_a_number_without_a_port() {
        for (host, address) in
            [("10.9.0.1", "10.9.0.1:0"), ("fd09::1", "[fd09::1]:0"), ("[fd09::1]", "[fd09::1]:0")]
        {
            assert_eq!(addresses_of(host).unwrap(), vec![address.parse::<SocketAddr>().unwrap()]);
        }
        for host in ["", "rdma:10.9.0.1:4444", "10.9.0.1:4444", "a/b"] {
            assert_eq!(addresses_of(host).unwrap_err().status, Status::Usage, "{host}");
        }
    }

    #[test]
    fn loopback_is_no_way_and_the_sentence_says_which_addresses_are() {
        let refused = try_way("127.0.0.1", false).unwrap_err();

        assert_eq!(refused.status, Status::Failed);
        // On a host without the RDMA libraries, that error is reported first.
        let said = &refused.message;
        assert!(
            said.contains("no RDMA device serves 127.0.0.1: ") || said.contains("cannot be loaded"),
            "{said}"
        );
    }

    #[test]
    fn report_in_words_and_in_json_agree_on_whether_rdma_can_be_used() {
        let host = HostReport::of_this_host();

        let (text, value) = (text_of(&host), json_of(&host));

        assert_eq!(value["usable"], host.is_usable());
        assert_eq!(text.ends_with(USABLE), host.is_usable());
        for sentence in host.missing() {
            assert!(text.contains(&sentence), "{text}");
        }
    }
}
