"""The second hand-written half of the Murphi model: how frames are handled, what may happen, what must hold.

Written from the protocol, not from the Python core, as murphi_text.py is, whose variables and procedures it uses. Must
never import anything: it is text.
"""

DRIVERS = """
procedure settle(ok: boolean);
var e: ev;
begin
  clear e;
  if ok & d_st = T then pull := u_arrived;
  else pull := u_none; pull_epoch := 0; pull_abandoned := false; end;
  if d_st = T then
    if ok then e.name := e_landed; r_landed(e);
    else d_pulling := false; e.name := e_peer_failed; r_peer_failed(e); end;
  elsif d_st = F then e.name := e_pull_settled; r_pull_settled(e);
  end;
end;

-- D drops the server of one life of P: what was pulled from it settles
procedure d_drops(l: life);
begin
  if (pull = u_flying | pull = u_reading | pull = u_hung) & pull_epoch = l then settle(false); end;
end;

procedure d_peer_down(name: event_name);
var e: ev;
begin
  clear e; e.name := name;
  d_knows := false; d_waiting := false; d_answered := false;
  if d_st != N & (d_bound | d_candidate | d_notice != n_none) then
    if name = e_refused then r_refused(e); else r_peer_silence(e); end;
  end;
  d_drops(d_link);
end;

-- a frame of life l of P; m: its message; bare: none
procedure d_frame(l: life; bare: boolean; m: to_d);
var e: ev; old: life;
begin
  if l >= d_link then
    clear e; e.epoch := l;
    old := d_link;
    if old > 0 & old < l then
      if d_st != N & (d_bound | d_candidate | d_notice != n_none) then e.name := e_peer_reborn; r_peer_reborn(e); end;
    end;
    d_link := l; d_knows := true; d_waiting := false; d_answered := true;
    if !bare then
      e.msg := true;
      switch m
      case 0: e.name := e_unknown; r_unknown(e);
      case 1: e.name := e_pending; r_pending(e);
      case 2: e.name := e_ready; e.ready := true; e.uuid := true; r_ready(e);
      case 3: e.name := e_failed; r_failed(e);
      case 4: e.name := e_failed; e.echo := true; r_failed(e);
      case 5: e.name := e_done_ack; e.uuid := true; r_done_ack(e);
      end;
    end;
    if old > 0 & old < l then d_drops(old); end;
  end;
end;

procedure p_frame(l: life; bare: boolean; m: to_p);
var e: ev; old: life; k: 0..11;
begin
  if l >= p_link then
    clear e; e.epoch := l;
    old := p_link;
    if old > 0 & old < l then
      if (live_p() & p_bound & p_peer_epoch < l) | (limbo & limbo_epoch < l) then
        e.name := e_peer_reborn; s_peer_reborn(e);
      end;
      if reg != g_none & reg_p_life = p_life & reg_d_epoch = old then reg := g_closed; end;
    end;
    p_link := l;
    if !bare then
      e.msg := true;
      if m <= 2 then e.name := e_hello; e.hello := true; e.ack := m; s_hello(e);
      elsif m = 3 then e.name := e_done; e.uuid := true; s_done(e);
      else
        e.name := e_abort; e.abort := true;
        k := m - 4;
        e.uuid := k >= 4;
        e.quiet := k = 2 | k = 3 | k = 6 | k = 7;
        e.foreign := k = 1 | k = 3 | k = 5 | k = 7;
        s_abort(e);
      end;
    end;
  end;
end;

function wire_empty(): boolean;
begin
  for i: to_p do for j: 1..2 do if dp[i][j] then return false; end; end; end;
  for i: to_d do for j: 1..2 do if pd[i][j] then return false; end; end; end;
  return true;
end;

function served(): boolean; begin return p_up & p_life = pull_epoch & reg != g_none & reg != g_closed; end;
"""

RULES = """
startstate
begin
  clear p_st; p_forgets(); clear d_st; d_forgets();
  p_up := true; p_life := 1; p_link := 0; p_minted := false; p_crashes := CRASHES_P;
  d_up := true; d_life := 1; d_link := 0; d_minted := false; d_crashes := CRASHES_D;
  early_own := e_none; early_own_epoch := 0; early_other := e_none; early_other_epoch := 0;
  limbo := false; limbo_epoch := 0;
  d_knows := false; d_waiting := false; d_answered := false;
  for i: to_p do for j: 1..2 do dp[i][j] := false; end; end;
  for i: to_d do for j: 1..2 do pd[i][j] := false; end; end;
  reg := g_none; reg_p_life := 0; reg_d_epoch := 0; reg_waived := false;
  pull := u_none; pull_epoch := 0; pull_abandoned := false;
  pages := false; lookup := false; committed := false;
  p_came := false; p_waits := false; d_came := false; d_waits := false;
end;

ruleset m: to_d; l: 1..2 do
  rule "deliver to D" pd[m][l] & d_up ==> begin pd[m][l] := false; d_frame(l, false, m); end;
  rule "copy to D" DUPLICATE & pd[m][l] & d_up ==> begin d_frame(l, false, m); end;
  rule "lose to D" LOSE & pd[m][l] ==> begin pd[m][l] := false; end;
end;
ruleset m: to_p; l: 1..2 do
  rule "deliver to P" dp[m][l] & p_up ==> begin dp[m][l] := false; p_frame(l, false, m); end;
  rule "copy to P" DUPLICATE & dp[m][l] & p_up ==> begin p_frame(l, false, m); end;
  rule "lose to P" LOSE & dp[m][l] ==> begin dp[m][l] := false; end;
end;
rule "stamp of D" p_up & d_up & 0 < p_link & p_link < d_life ==> begin p_frame(d_life, true, 0); end;
rule "stamp of P" p_up & d_up & 0 < d_link & d_link < p_life ==> begin d_frame(p_life, true, 0); end;

rule "leg of P" !p_came & p_up ==>
var e: ev;
begin clear e; p_came := true; p_waits := true; e.name := e_leg; s_leg(e); end;
rule "leg of D" !d_came & d_up ==>
var e: ev;
begin clear e; d_came := true; d_waits := true; e.name := e_leg; r_leg(e); end;

rule "admit" p_st = B ==> var e: ev; begin clear e; e.name := e_admit; s_admit(e); end;
rule "kv_ready" p_st = W ==>
var e: ev;
begin clear e; e.name := e_kv_ready; s_kv_ready(e); if p_st = T then p_waits := false; end; end;
rule "abort on P" ABORT_P & live_p() ==> var e: ev; begin clear e; e.name := e_abort_local; s_abort_local(e); end;
rule "P request timer" TIMERS & p_t_request ==>
var e: ev;
begin clear e; p_t_request := false; e.name := e_expire_request; s_expire_request(e); end;
rule "P lease timer" TIMERS & p_t_lease ==>
var e: ev;
begin clear e; p_t_lease := false; e.name := e_expire_lease; s_expire_lease(e); end;
rule "P tombstone timer" TIMERS & p_t_tombstone & wire_empty() & !live_d() & d_notice = n_none ==>
var e: ev;
begin clear e; p_t_tombstone := false; e.name := e_tombstone_timer; s_tombstone_timer(e); end;
ruleset other: boolean do
  rule "early timer" TIMERS & (other & early_other != e_none | !other & early_own != e_none) ==>
  var e: ev;
  begin
    clear e; e.name := e_early_timer; e.foreign := other;
    if p_st = N then s_early_timer(e); else sdo_forget_early(e); end;
  end;
end;
rule "limbo timer" TIMERS & limbo & d_st != T ==>
var e: ev;
begin
  clear e; e.name := e_limbo_timer; s_limbo_timer(e);
  if reg != g_none then reg_waived := true; end;
end;

rule "start" d_st = W & d_manifest & !pages ==> var e: ev; begin clear e; e.name := e_start; r_start(e); end;
rule "abort on D" ABORT_D & live_d() ==> var e: ev; begin clear e; e.name := e_abort_local; r_abort_local(e); end;
rule "D request timer" TIMERS & d_t_request ==>
var e: ev;
begin clear e; d_t_request := false; e.name := e_expire_request; r_expire_request(e); end;
rule "D bootstrap timer" TIMERS & d_t_bootstrap ==>
var e: ev;
begin clear e; d_t_bootstrap := false; e.name := e_expire_bootstrap; r_expire_bootstrap(e); end;
rule "D transfer timer" TIMERS & d_t_transfer ==>
var e: ev;
begin clear e; d_t_transfer := false; e.name := e_expire_transfer; r_expire_transfer(e); end;
rule "D hello timer" TIMERS & d_t_hello ==>
var e: ev;
begin clear e; d_t_hello := false; e.name := e_hello_timer; r_hello_timer(e); end;
ruleset late: boolean do
  rule "D notice timer" TIMERS & d_t_notice ==>
  var e: ev;
  begin clear e; d_t_notice := false; e.name := e_notice_timer; e.late := late; r_notice_timer(e); end;
end;
rule "D tombstone timer" TIMERS & d_t_tombstone & wire_empty() ==>
var e: ev;
begin clear e; d_t_tombstone := false; e.name := e_tombstone_timer; r_tombstone_timer(e); end;
rule "silence" TIMERS & d_up & d_knows & d_waiting ==> begin d_peer_down(e_peer_silence); end;
rule "refused" CRASHES_P > 0 & d_up & !p_up & d_st != N & (d_bound | d_candidate | d_notice != n_none) ==>
begin d_peer_down(e_refused); end;

ruleset old: boolean do
  rule "candidates" lookup & !old ==>
  var e: ev;
  begin clear e; lookup := false; e.name := e_candidates; e.ack := p_life; r_candidates(e); end;
end;

rule "issue" pull = u_queued & d_st = T ==> begin pull := u_flying; end;
rule "never issued" pull = u_queued & d_st != T ==> begin settle(false); end;
rule "graveyard" TIMERS & pull != u_none & pull != u_queued & pull_abandoned ==>
var e: ev;
begin
  clear e; e.name := e_peer_failed;
  if d_st = T & d_bound then d_pulling := false; r_peer_failed(e); end;
  d_drops(pull_epoch);
end;
rule "reach" pull = u_flying & served() & reg = g_open ==> begin pull := u_reading; reg := g_taken; end;
rule "fenced" pull = u_flying & served() & reg = g_empty ==> begin settle(false); end;
rule "land" pull = u_reading ==> begin settle(true); end;
rule "broken" (pull = u_flying | pull = u_reading) & !served() ==> begin settle(false); end;
rule "part fails" PART_FAILS & (pull = u_flying | pull = u_reading) & served() ==> begin settle(false); end;
rule "hang" HANGS & (pull = u_flying | pull = u_reading) ==> begin pull := u_hung; end;
rule "scatter" pull = u_arrived & d_st = T ==>
var e: ev;
begin
  clear e; committed := true; d_waits := false; pull := u_none; pull_epoch := 0; pull_abandoned := false;
  e.name := e_scattered; r_scattered(e);
end;
rule "finish" pages & committed & d_st != T ==> begin pages := false; end;

rule "P dies" p_up & p_crashes > 0 ==>
begin
  p_up := false; p_crashes := p_crashes - 1; p_link := 0; p_minted := false; p_st := N; p_forgets();
  early_own := e_none; early_own_epoch := 0; early_other := e_none; early_other_epoch := 0;
  limbo := false; limbo_epoch := 0; p_waits := false;
  for i: to_p do for j: 1..2 do dp[i][j] := false; end; end;
  if reg != g_none then reg := g_closed; end;
end;
rule "P restarts" !p_up ==> begin p_up := true; p_life := p_life + 1; end;
rule "D dies" d_up & d_crashes > 0 ==>
begin
  d_up := false; d_crashes := d_crashes - 1; d_link := 0; d_minted := false; d_st := N; d_forgets();
  d_knows := false; d_waiting := false; d_answered := false;
  for i: to_d do for j: 1..2 do pd[i][j] := false; end; end;
  pull := u_none; pull_epoch := 0; pull_abandoned := false; pages := false; lookup := false; d_waits := false;
end;
rule "D restarts" !d_up ==> begin d_up := true; d_life := d_life + 1; end;
"""

PROPERTIES = """
invariant "S1 registered bytes belong to a live room" reg = g_open -> (p_st = T & p_uuid);
invariant "S1 pages belong to a room that pulls or has committed" pages -> (d_st = T | committed);
invariant "S2 success only after commit" d_st = S -> committed;
invariant "S3 charged exactly while working" p_charged = (p_st = W | p_st = T);
invariant "S3 charged once" !(p_charged & limbo);
invariant "S4 offered and bound is registered" (p_st = T & p_bound) -> p_registered;
invariant "S4 never withdrawn under its room" (p_st = T & p_registered) -> reg != g_empty;
invariant "S4 bytes in flight are paid for"
  (pull = u_reading & p_up & p_life = pull_epoch & reg != g_closed & !(reg_waived & pull_abandoned)) ->
  (p_charged | limbo);
invariant "S13 P succeeds only with D" p_st = S -> committed;
invariant "S17 a pull has pages" d_st = T -> pages;
invariant "V1 a live room has a timer"
  (live_p() -> p_t_request | p_t_lease) & (live_d() -> d_t_request | d_t_bootstrap | d_t_transfer);
invariant "V1 clients are told" p_waits = (p_st = B | p_st = W);
invariant "V1 clients of D are told" d_waits = live_d();
invariant "V2 a notice has a timer" (d_notice != n_none) = d_t_notice;
"""
