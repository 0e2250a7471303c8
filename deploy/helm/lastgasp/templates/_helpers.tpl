{{- define "lastgasp.labels" -}}
app.kubernetes.io/part-of: lastgasp
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end }}

{{- define "lastgasp.daemon.labels" -}}
{{ include "lastgasp.labels" . }}
{{ include "lastgasp.daemon.selector" . }}
{{- end }}

{{- define "lastgasp.router.labels" -}}
{{ include "lastgasp.labels" . }}
{{ include "lastgasp.router.selector" . }}
{{- end }}

{{- define "lastgasp.daemon.selector" -}}
app.kubernetes.io/name: lastgasp
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "lastgasp.router.selector" -}}
app.kubernetes.io/name: lastgasp-router
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "lastgasp.name" -}}
{{- if contains "lastgasp" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-lastgasp{{ end }}
{{- end }}

{{- define "lastgasp.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "lastgasp.capabilities" -}}
{{- if .Values.daemon.capabilities -}}
{{ toJson .Values.daemon.capabilities }}
{{- else if eq .Values.daemon.tier "full" -}}
["BPF", "PERFMON", "SYS_PTRACE", "DAC_READ_SEARCH", "KILL"]
{{- else -}}
["BPF", "PERFMON"]
{{- end }}
{{- end }}

{{- define "lastgasp.toml" -}}
mode = {{ .Values.mode | quote }}

[nats]
url = {{ .Values.nats.url | quote }}
replicas = {{ .Values.nats.replicas }}

[status]
listen = "0.0.0.0:{{ .Values.daemon.metricsPort }}"
{{- if .Values.daemon.declare.enabled }}
{{- if ne .Values.daemon.tier "full" }}
{{- if not .Values.daemon.capabilities }}
{{- fail "daemon.declare.enabled needs daemon.tier full: the environment of other users' processes cannot be read without SYS_PTRACE and DAC_READ_SEARCH. Set daemon.declare.enabled=false and name workers in daemon.extraConfig, or daemon.tier=full" }}
{{- end }}
{{- end }}

[declare]
enabled = true
cgroups = {{ toJson .Values.daemon.declare.cgroups }}
on_lost = {{ .Values.daemon.onLost | quote }}
reap_grace_ms = {{ .Values.daemon.reapGraceMs }}
{{- end }}
{{- with .Values.daemon.extraConfig }}

{{ . }}
{{- end }}
{{- end }}

{{- define "lastgasp.egress" -}}
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
- ports:
    - port: {{ .Values.nats.port }}
- ports:
    {{- range .Values.networkPolicy.enginePorts }}
    - port: {{ . }}
    {{- end }}
{{- end }}
